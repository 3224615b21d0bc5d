// What the walks over a sequence's chunks share: the task of a CTA, the schedule, the log gates' loads.
//
// A walker is a warpgroup that owns 64 columns of V. It holds the transposed state (64 x K) in fp32 and
// computes everything transposed: so the A operand of each GEMM is in its own registers and B in shared
// memory, and walkers never talk to each other.
#pragma once

#include "channel_gate/bindings/params.h"
#include "channel_gate/chunk.cuh"
#include "common/tile_loader.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::channel_gate {

constexpr int kWalkerColumns = 64;  // of V

// How the work on a chunk is ordered.
//   sequential  the gate warps begin a chunk when the walkers are done with the one before; every GEMM of a
//               walker is waited for before its next step
//   overlapped  the gate warps are a chunk ahead; GEMMs are in flight under a walker's other work
enum class Schedule : int { sequential = 0, overlapped = 1 };

// The log gates of a call. Boxes have 64 channels and, of fp32 gates, the tokens of a chunk, of 16-bit ones
// the tokens of a block.
struct LogGates {
    TensorMap map;
    DType dtype;

    __device__ inline bool is_float() const { return dtype == DType::float32; }

    // Of 64 channels of a chunk: how many boxes and bytes they are, where one of them begins in the memory of
    // the blocks.
    __device__ inline int boxes() const { return is_float() ? 1 : kBlocks; }
    __device__ inline uint32_t part_bytes() const { return kBlocks * kBlockBytes / (is_float() ? 1 : 2); }
    __device__ inline uint32_t place_of(int box) const {
        return is_float() ? 0 : box * kBlockBytes + kShortGates;
    }
};

// The (sequence, head, columns of V) of a CTA.
struct Task {
    int batch, head, column;  // column: first of V
    int first_row, tokens;    // tokens < 0: nothing to do
    int chunks;
    int64_t state;  // sequence * heads + head

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        return {g.packed() ? 0 : s.sequence,
                head,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
    // The chunk of a walk's step.
    template <class C> __device__ inline int chunk_of(int step) const {
        return C::kBackward ? chunks - 1 - step : step;
    }
    __device__ inline int tokens_of(int chunk) const { return min(tokens - chunk * kChunk, kChunk); }
};

}  // namespace tfla_tk::channel_gate
