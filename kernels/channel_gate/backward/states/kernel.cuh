// The gradients of q, k and the log gates of gated linear attention (GLA).
//
// Two kernels, in blocks of 16 tokens:
//   gla_left   forward in time: dq, and q dq for the gates
//   gla_right  backward in time: dk, and dg
// One CTA of either owns a (segment, head, one or two strips of 64 columns of K):
//     gate warps  eight: what writes to the state, results, loads and stores (states/gates.cuh)
//     walkers     one or two, the state or its gradient in registers (states/walker.cuh)
// Equations: bindings/params_backward.h and docs/gla-backward.md.
#pragma once

#include "channel_gate/backward/states/gates.cuh"
#include "channel_gate/backward/states/walker.cuh"
#include "common/kernel.cuh"

namespace tfla_tk::channel_gate {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void gla_states_kernel(const __grid_constant__ StatesGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<StatesMemory<C>*>(shared_memory);
        const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
        if (!begin_task<C>(g, smem, blockIdx.x, [&] {
                g.readers.prefetch(), g.writers.prefetch(), g.gates.prefetch();
                g.of_readers.prefetch(), g.of_writers.prefetch(), g.result.box.prefetch();
            }))
            return;
        if (warp < C::kGateWarps) {
            if constexpr (C::kWalkers > 1) set_registers<C::kGateRegisters, C::kThreads, 1>();
            run_state_gates(g, smem, warp);
        } else {
            if constexpr (C::kWalkers > 1) set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            walk_states(g, smem, warp - C::kGateWarps);
        }
    }
}

}  // namespace tfla_tk::channel_gate
