// What the matrices kernel leaves of a chunk for the walk (KdaTiles in bindings/params.h).
#pragma once

#include "kda/bindings/params.h"
#include "sequence/token_factors.cuh"

namespace tfla_tk::kda {

// Q_F, K_F and K_G. NOTES: those of a chunk lie together, so that one tensor map serves all three.
enum TileOfChunk : int { kQueries, kReads, kWriters, kTiles };

// What the walks read of the factors, and what the kernel of the gradients reads besides.
template <int kDimK> struct alignas(16) WalkFactors {
    float decay[kDimK];  // e^{b_L}
    TokenFactors beta;
};
template <int kDimK> struct Factors : WalkFactors<kDimK> {
    float query_rstd[kChunk], key_rstd[kChunk];  // 1 / norm of l2norm, without it 1
};

inline int slots_of(const KdaShape& s) {
    return chunk_slots(s.seq, s.cut.sequences, s.cut.offsets != nullptr);
}

// The smallest tile that holds K.
inline int tile_of_k(const KdaShape& s) { return s.dim_k <= 64 ? 64 : 128; }

}  // namespace tfla_tk::kda
