// Where the walks of a training call leave a state per chunk, for the kernel of the gradients: the forward
// S^T at the chunk's begin, the mirror dS'^T at its end, both rounded to q's type. They lie as they are in
// the registers of a walker, as fragments of 16 columns of V x 16 of K (rt<T, 16, 16>, rows are columns of
// V):
//   [batch * heads, slots, groups of 64 columns of V, 4 warps, kDimK / 16, 32 lanes] of 16 bytes
// so that a warp moves 512 bytes in one instruction.
#pragma once

#include <cstdint>

#include "kda/tiles.cuh"

namespace tfla_tk::kda {

constexpr int kWalkerColumns = 64;  // of V: a group

template <int kDimK> struct StateFragments {
    static constexpr int kWarps = kWalkerColumns / 16, kSteps = kDimK / 16, kLanes = 32;

    uint4* data;
    int slots, groups;  // groups: dim_v / 64, rounded up

    // The lane's four words of a fragment; head: of all batch entries.
    __device__ inline uint4* at(int head, int slot, int group, int warp, int step, int lane) const {
        const int64_t chunk = static_cast<int64_t>(head) * slots + slot;
        return data +
               (((chunk * groups + group) * kWarps + warp) * kSteps + step) * static_cast<int64_t>(kLanes) +
               lane;
    }

    // Of so many chunks of all heads.
    static constexpr std::int64_t bytes(std::int64_t chunks, int groups) {
        return chunks * groups * kWarps * kSteps * kLanes * static_cast<std::int64_t>(sizeof(uint4));
    }
};

inline int groups_of(const KdaShape& s) { return (s.dim_v + kWalkerColumns - 1) / kWalkerColumns; }

}  // namespace tfla_tk::kda
