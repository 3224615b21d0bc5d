// What the walks over a sequence's chunks share: the task of a CTA, the log gates' loads.
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

// Zeros the rows of a block from `first` on, by one warp.
__device__ inline void zero_bytes(void* rows, uint32_t row_bytes, int first) {
    zero_units(reinterpret_cast<uint4*>(static_cast<char*>(rows) + first * row_bytes),
               (kBlock - first) * row_bytes / sizeof(uint4));
}

// Prefetches kBytes into L2, by a whole warp.
template <int kBytes> __device__ __forceinline__ void prefetch_bytes(const void* from) {
    constexpr int kLine = 128, kLines = kBytes / kLine;
    const char* const own = static_cast<const char*>(from) + fresh_laneid() * kLine;
    each<0, (kLines + 31) / 32>([&](int i) {
        if (32 * i + 32 <= kLines || fresh_laneid() < kLines - 32 * i)
            asm volatile("prefetch.global.L2 [%0];\n" ::"l"(own + 32 * i * kLine));
    });
}

// The (segment, head, columns of V) of a CTA.
struct Task {
    int batch, head, column;  // column: first of V
    int first_row, tokens;    // tokens < 0: nothing to do
    int chunks;
    int64_t state;   // sequence * heads + head
    int64_t border;  // slot * heads + head of the border behind the segment; that of the border before it
                     // is less by `heads`
    bool is_first, is_last;  // segment of its sequence
    int first_chunk;         // in its sequence
    int first_slot;          // of its chunks (chunk_slots)

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const int number = pair / g.heads;
        const Segment s = find_segment(g.cut, g.seq, number);
        const int first_chunk = s.number * g.cut.segment_chunks;
        const int slots_before = g.packed() ? s.first_row / kChunk - first_chunk + s.sequence : 0;
        return {g.packed() ? 0 : s.sequence,
                head,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                static_cast<int64_t>(s.sequence) * g.heads + head,
                static_cast<int64_t>(number - s.sequence) * g.heads + head,
                s.number == 0,
                s.number + 1 == s.count,
                first_chunk,
                slots_before + first_chunk};
    }
    // The state that a walk begins with: of `borders` between segments, else the given one, null for zero.
    template <bool kBackward>
    __device__ inline const float* entering(const float* given, const float* borders, int heads,
                                            int64_t state_size) const {
        const bool is_given = kBackward ? is_last : is_first;
        if (is_given && given == nullptr) return nullptr;
        const int64_t place = is_given ? state : kBackward ? border : border - heads;
        return (is_given ? given : borders) + place * state_size;
    }
    // Whether a walk ends where its sequence does.
    template <bool kBackward> __device__ inline bool ends_sequence() const {
        return kBackward ? is_first : is_last;
    }
    // The chunk of a walk's step.
    template <class C> __device__ inline int chunk_of(int step) const {
        return C::kBackward ? chunks - 1 - step : step;
    }
    __device__ inline int tokens_of(int chunk) const { return min(tokens - chunk * kChunk, kChunk); }
};

}  // namespace tfla_tk::channel_gate
