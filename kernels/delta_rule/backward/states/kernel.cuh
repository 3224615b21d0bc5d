// The gradients of q, k and the log decay for K of more than 128, once the mirror walk has left dV
// (backward/backward.cu).
//
// Two kernels:
//   delta_left   forward in time: dq and the left part of dk (left.cuh)
//   delta_right  backward in time: dk (right.cuh)
// One CTA of either owns a (segment, head, slice of V, 128 columns of K):
//     producer   loads writes, dO, dV, q, k and the results of the turn before (the right walk first the left
//                part of dk); scans the gates; stores the results
//     walkers    two, the state or its gradient in registers (walker.cuh)
// Equations: bindings/params_states.h and docs/delta-rule-backward.md.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/backward/states/config.cuh"
#include "delta_rule/backward/states/left.cuh"
#include "delta_rule/backward/states/producer.cuh"
#include "delta_rule/backward/states/right.cuh"

namespace tfla_tk::delta_rule {

// The number of a CTA, for its first warp. CTAs that share results wait for each other, so they draw tickets
// in the order in which they begin. Tickets go by groups of as many results as the GPU serves at once: first
// all first turns of a group, then all second ones. So a CTA only waits for one that runs, and the wait is
// paid once per launch, not once per CTA.
__device__ inline int block_of_states(const StatesGlobals& g) {
    if (g.written == nullptr || threadIdx.x >= 32) return blockIdx.x;
    int ticket = 0;
    if (threadIdx.x == 0) ticket = atomicAdd(g.written, 1);
    ticket = __shfl_sync(0xffffffff, ticket, 0);
    // of ctas CTAs of a turn each
    const int turns = g.turns(), results = gridDim.x / (turns * g.ctas);
    const int first = ticket / (g.at_once * turns * g.ctas) * g.at_once;
    const int rest = ticket - first * turns * g.ctas, of_turn = min(g.at_once, results - first) * g.ctas;
    const int turn = rest / of_turn, cta = rest % of_turn;
    return ((first + cta / g.ctas) * turns + turn) * g.ctas + cta % g.ctas;
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_states_kernel(const __grid_constant__ StatesGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<StatesMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if (!begin_task<C>(g, smem, block_of_states(g), [&] {
                g.q.prefetch(), g.k.prefetch(), g.writes.prefetch(), g.dout.prefetch(), g.dv.prefetch();
            }))
            return;
        if (warpgroup_id == 0) {
            set_registers<C::kProducerRegisters, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_values(g, smem);
            else if (warp == 1)
                with_gate_ring(smem.gate_ring, [&](auto& ring) { scan_gates(g, smem, ring); });
            else if (warp == 2)
                load_columns_and_store_results(g, smem);
            else
                load_earlier(g, smem);
        } else {
            set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            if constexpr (C::kIsLeft)
                walk_left(g, smem);
            else
                walk_right(g, smem);
        }
    }
}

}  // namespace tfla_tk::delta_rule
