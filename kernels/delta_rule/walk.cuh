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
#include "delta_rule/chunk_matrices/freed.cuh"
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

// Warpgroups that make A and P in the CTA of a walk (chunk_matrices/makers.cuh). Beside two walkers there are
// no registers for them: the matrices come from device memory. NOTES: with K = 64, ptxas serialises the
// walker's GEMMs beside two makers (C7512).
constexpr int makers_beside(int walkers, int dim_k) { return walkers == 2 ? 0 : dim_k == 64 ? 1 : 2; }

// Registers per thread of each role. Warpgroups: the producer, the walkers, the makers.
// NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
template <int kWalkers, int kMakers> struct WalkRegisters {
    static constexpr int kProducer = 40, kWalker = 232, kMaker = kMakers == 2 ? 112 : 168;
    static constexpr int kWarpgroups = 1 + kWalkers + kMakers;
    static_assert(kProducer + kWalkers * kWalker + kMakers * kMaker <=
                  65536 / (128 * kWarpgroups) / 8 * 8 * kWarpgroups);
};

// Arguments that both walks share; fields as in bindings/params.h.
struct WalkGlobals {
    TensorMap q, k, a, p;  // boxes of a chunk
    Gate g, beta;
    Cut cut;
    float* borders;
    int heads, group, seq, dim_k, dim_v;
    int ctas;  // per sequence and head
    float scale;

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

// Loads A and P of a chunk, which is a step of the walk, by one warp.
template <class C, class Memory>
__device__ inline void load_matrices(const WalkGlobals& g, const Task& task, Memory& smem, int step,
                                     int chunk) {
    auto& matrices = smem.matrices[Use<C::kMatrixStages>(step).slot];
    semaphore& ready = smem.ready[Use<C::kReadyStages>(step).slot];
    MatricesFreed::wait_for(smem.freed.here, step - C::kMatrixStages);
    const int row = (task.first_slot + chunk) * kChunk, head = task.batch * g.heads + task.head;
    if (fresh_laneid() != 0) return;
    tma::expect_bytes(ready, sizeof(matrices));
    load_panels(matrices.a, g.a, ready, 0, row, head, 0);
    load_panels(matrices.p, g.p, ready, 0, row, head, 0);
}

// The barrier of the tiles and gates of a step: the makers', or without these the walkers', who wait for
// everything of a chunk at one barrier, since its answer takes them some 30 cycles.
template <class C, class Memory> __device__ inline semaphore& arrival_of_tiles(Memory& smem, int step) {
    if constexpr (C::kMakers > 0)
        return smem.arrived[Use<C::kStages>(step).slot];
    else
        return smem.ready[Use<C::kReadyStages>(step).slot];
}

}  // namespace tfla_tk::delta_rule
