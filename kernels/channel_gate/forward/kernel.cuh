// The kernel of the forward, of its mirror too. A CTA walks the chunks of a (segment, head,
// 64 or 128 columns of V):
//   gate warps  make of q, k and the log gates, a chunk ahead, the operands of the walk and the scores P, in
//               shared memory; some of them load and store (gates.cuh, carrier.cuh)
//   walkers     one or two, the state in registers (walker.cuh)
#pragma once

#include "channel_gate/forward/gates.cuh"
#include "channel_gate/forward/walker.cuh"
#include "common/kernel.cuh"

namespace tfla_tk::channel_gate {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void gla_walk_kernel(const __grid_constant__ ForwardGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<ForwardMemory<C>*>(shared_memory);
        const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
        smem.init_tiles();
        if (!begin_task<C>(g, smem, blockIdx.x, [&] {
                g.q.prefetch(), g.k.prefetch(), g.gates.map.prefetch(), g.v.prefetch(), g.o.chunk.prefetch();
            }))
            return;
        if constexpr (C::kShares) cluster_sync();  // the other CTA has initialised its barriers
        if (warp < C::kGateWarps) {
            set_registers<C::kGateRegisters, C::kThreads, 1>();
            run_gates(g, smem, warp);
        } else {
            set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            walk_forward(g, smem, (warp - C::kGateWarps) / 4);
        }
        if constexpr (C::kShares)
            cluster_sync();  // the other CTA may still write to this one's shared memory
    }
}

}  // namespace tfla_tk::channel_gate
