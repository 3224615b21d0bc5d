// The walk of the delta rule's forward over the chunks. One CTA owns a (sequence, head, 64 or 128 columns of
// V):
//   producer      loads q, k, v and the matrices; scans the gates; stores O, and the writes for a backward
//   walkers       one or two, the state in registers (walker.cuh)
//   scorer        makes P (scorer.cuh), where kMakesScores
//   maker         in its place: makes A (chunk_matrices/in_walk.cuh). Then the walkers make P
// Where the walk leaves multiprocessors idle, makers of the matrices run beside it
// (chunk_matrices/makers.cuh).
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/chunk_matrices/makers.cuh"
#include "delta_rule/forward/config.cuh"
#include "delta_rule/forward/producer.cuh"
#include "delta_rule/forward/walker.cuh"
#include "delta_rule/forward/wide_walker.cuh"
#include "delta_rule/scorer.cuh"

namespace tfla_tk::delta_rule {

// The block-th CTA of the walk.
template <class C>
__device__ inline void run_walk(const ForwardGlobals& g, unsigned char* shared_memory, int block) {
    auto& smem = *reinterpret_cast<ForwardMemory<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
    if (!begin_task<C>(g, smem, block,
                       [&] { g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.o.chunk.prefetch(); }))
        return;
    if (warpgroup_id == 0) {
        set_registers<C::kProducerRegisters, C::kThreads, 1>();
        const int warp = warpgroup::warpid();
        if (warp == 0)
            load_tiles(g, smem);
        else if (warp == 1)
            scan_gates(g, smem);
        else if (warp - 2 < C::kWalkers)
            load_values_and_store_outputs(g, smem, warp - 2);
    } else if (warpgroup_id <= C::kWalkers) {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        if constexpr (C::kIsWide)
            walk_forward_wide(g, smem, warpgroup_id - 1);
        else
            walk_forward(g, smem, warpgroup_id - 1);
    } else if (C::kHasScorer && warpgroup_id < C::kWalkWarpgroups) {
        set_registers<C::kScorerRegisters, C::kThreads, 1>();
        if constexpr (C::kMakesMatrices)
            make_matrices_in_walk<C>(g, smem);
        else if constexpr (C::kHasScorer)
            make_scores<C>(g, smem);
    } else if constexpr (C::kIdleWarpgroups > 0) {
        set_registers<C::kIdleRegisters, C::kThreads, 1>();
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_forward_kernel(const __grid_constant__ ForwardGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        run_walk<C>(g, shared_memory, blockIdx.x);
    }
}

// The walk beside makers (chunk_matrices/makers.cuh).
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void delta_forward_with_makers_kernel(
    const __grid_constant__ WithMakers<ForwardGlobals> g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const int part = draw_part(g.makers, reinterpret_cast<int&>(*shared_memory));
        if (part >= g.makers.ctas)
            run_walk<C>(g.walk, shared_memory, part - g.makers.ctas);
        else
            run_makers<C>(g.makers, shared_memory, part);
    }
}

}  // namespace tfla_tk::delta_rule
