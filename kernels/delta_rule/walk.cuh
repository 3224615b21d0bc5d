// What the walk of the forward and its mirror in the backward share: the task of a CTA, the matrices of a
// chunk, steps of GEMMs whose A operand is in registers.
//
// A walker is a warpgroup that owns 64 columns of V. It holds the transposed state (64 x K) in fp32 and
// computes everything transposed: so the A operand of each GEMM is in its own registers and B in shared
// memory, and walkers never talk to each other.
#pragma once

#include <algorithm>

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
    int heads, group, seq, dim_k, dim_v;
    int ctas;  // per sequence and head
    float scale;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// The (sequence, head, columns of V, or of K) of a CTA.
struct Task {
    int batch, head, key_head, column;  // column: the first one
    int first_row, tokens;              // tokens < 0: nothing to do
    int chunks, first_slot;             // first_slot: of the sequence's matrices
    int64_t state;                      // sequence * heads + head

    // Called by whole warps.
    template <class C, class Globals> __device__ static inline Task of_block(const Globals& g, int block) {
        const int pair = block / g.ctas, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        return {g.packed() ? 0 : s.sequence,
                head,
                head / g.group,
                block % g.ctas * C::kWalkers * kWalkerColumns,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                g.packed() ? s.first_row / kChunk + s.sequence : 0,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

// body(i) for i of [begin, end), unrolled.
template <int begin, int end, class Body> __device__ inline void each(Body body) {
#pragma unroll
    for (int i = begin; i < end; i++) body(i);
}

// Loads A and P of a chunk, by one thread, which has expected their bytes.
template <class Square>
__device__ inline void load_matrices(const WalkGlobals& g, const Task& task, Square& a, Square& p,
                                     semaphore& arrived, int chunk) {
    const int row = (task.first_slot + chunk) * kChunk, head = task.batch * g.heads + task.head;
    load_panels(a, g.a, arrived, 0, row, head, 0);
    load_panels(p, g.p, arrived, 0, row, head, 0);
}

// d (+)= a B, one step of k = 16 in a group of its own. kColumns: B's columns are N, else its rows. `first` of
// the steps that follow one another. NOTES: a group of its own, since with A in registers every HGMMA counts
// by itself: to leave a group of eight in flight would be to wait for seven of them.
template <bool kColumns, class D, class A>
__device__ inline void multiply_step(D& d, A& a, uint64_t b, bool accumulate, bool first) {
    pin(a);
    if (first) pin(d);
    wgmma_fence();
    wgmma_step<kColumns>(d, a, 0, b, accumulate);
    warpgroup::mma_commit_group();
}

template <class A, int kCount> __device__ inline void pin_all(A (&fragments)[kCount]) {
#pragma unroll
    for (auto& a : fragments) pin(a);
}

// Multiplies two numbers in place. NOTES: as asm: else ptxas keeps the products in registers of their own
// (C7512).
__device__ inline void scale_in_place(float2& x, float2 by) {
    asm("mul.ftz.f32 %0, %0, %1;" : "+f"(x.x) : "f"(by.x));
    asm("mul.ftz.f32 %0, %0, %1;" : "+f"(x.y) : "f"(by.y));
}

}  // namespace tfla_tk::delta_rule
