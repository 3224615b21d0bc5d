// What the walk of the forward and its mirror in the backward share: the task of a CTA, the matrices of a
// chunk.
//
// A walker is a warpgroup that owns 64 columns of V. It holds the transposed state (64 x K) in fp32 and
// computes everything transposed: so the A operand of each GEMM is in its own registers and B in shared
// memory, and walkers never talk to each other.
#pragma once

#include <algorithm>

#include "common/register_steps.cuh"
#include "common/sync.cuh"
#include "common/tile_loader.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/gates.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

constexpr int kWalkerColumns = 64;  // of V

// How the GEMMs of a chunk are ordered against the rest of its work.
//   sequential  every GEMM is waited for before the next step
//   overlapped  GEMMs off the chain from state to state are in flight under the rest of the work
enum class Schedule : int { sequential = 0, overlapped = 1 };

// Arguments that both walks share; fields as in bindings/params.h.
struct WalkGlobals {
    TensorMap q, k, a, p;  // boxes of a chunk
    Gate g, beta;
    Cut cut;
    float* borders;
    int heads, group, seq, dim_k, dim_v;
    int ctas;  // per sequence and head
    float scale;
    const int* made;  // [batch * heads, slots], not 0 once A and P are there; null without makers
    int slots;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// The (segment of a sequence, head, columns of V, or of K) of a CTA.
struct Task {
    int batch, head, key_head, column;  // column: the first one
    int first_row, tokens;              // tokens < 0: nothing to do
    int chunks, first_slot;             // first_slot: of the segment's matrices
    int number, segments;               // of this segment, and how many the sequence has
    int first_border;                   // slot of the sequence's first border
    int64_t state;                      // sequence * heads + head

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        constexpr int kSegmentTokens = kSegmentChunks * kChunk;
        const int start = s.first_row - s.number * segment_tokens(g.cut);
        return {g.packed() ? 0 : s.sequence,
                head,
                head / g.group,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                s.first_row / kChunk + (g.packed() ? s.sequence : 0),
                s.number,
                s.count,
                g.packed() ? start / kSegmentTokens : s.sequence * ((g.seq - 1) / kSegmentTokens),
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

// Whether a border between segments lies before a chunk of a sequence, which is not the first one.
__device__ inline bool is_border(int chunk) { return chunk % kSegmentChunks == 0; }

// The state of a task's head at a border of its sequence, that before the sequence's chunk `chunk`.
template <class Globals> __device__ inline auto* border_state(const Globals& g, const Task& task, int chunk) {
    const int slot = task.first_border + chunk / kSegmentChunks - 1;
    return g.borders + (static_cast<int64_t>(slot) * g.heads + task.head) * g.dim_k * g.dim_v;
}

// Waits until a chunk's matrices are made, by one warp, which may load them then.
__device__ inline void wait_made(const WalkGlobals& g, const Task& task, int chunk) {
    if (fresh_laneid() == 0) {
        const int head = task.batch * g.heads + task.head;
        const int* const made = g.made + head * g.slots + task.first_slot + chunk;
        while (acquire_from_device(made) == 0) __nanosleep(32);
        fence_async_global();
    }
    __syncwarp();
}

// Loads A and P of a chunk, by one thread, which has expected their bytes.
template <class Square>
__device__ inline void load_matrices(const WalkGlobals& g, const Task& task, Square& a, Square& p,
                                     semaphore& arrived, int chunk) {
    const int row = (task.first_slot + chunk) * kChunk, head = task.batch * g.heads + task.head;
    load_panels(a, g.a, arrived, 0, row, head, 0);
    load_panels(p, g.p, arrived, 0, row, head, 0);
}

}  // namespace tfla_tk::delta_rule
