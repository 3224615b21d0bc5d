// The walk of the delta rule's backward that makes dq, dk and dv at once, from the last chunk to the first.
// The forward has left the state that enters each chunk, so q, k, the writes and dO are read once. One CTA
// owns a (segment of a sequence, head of v, 128 columns of V):
//   producer    loads q, k, dO, the writes, A and the states; scans the gates; stores dq, dk and dV, which
//               take the places of q, k and dO
//   walkers     two, dS in registers: dV and the scores (walker.cuh)
//   keys        one warpgroup: dq and dk (keys.cuh)
// Heads of v that share a head of q leave a part of dq and dk each. Slices of V add up theirs in turns.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/backward/gradients/keys.cuh"
#include "delta_rule/backward/gradients/producer.cuh"
#include "delta_rule/backward/gradients/walker.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_gradients_kernel(const __grid_constant__ GradientsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<GradientsMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if (!begin_task<C>(g, smem, block_of_gradients(g),
                           [&] { g.q.prefetch(), g.k.prefetch(), g.dout.prefetch(), g.states.prefetch(); }))
            return;
        if (warpgroup_id == 0) {
            set_registers<C::kProducerRegisters, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_states(g, smem);
            else if (warp == 1)
                scan_gates(g, smem);
            else if (warp == 2)
                move_values(g, smem);
            else
                move_keys(g, smem);
        } else if (warpgroup_id <= C::kWalkers) {
            set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            GradientsWalker<C>(g, smem, warpgroup_id - 1).walk();
        } else {
            set_registers<C::kKeysRegisters, C::kThreads, 1>();
            GradientsOfKeys<C>{g, smem}.walk();
        }
    }
}

}  // namespace tfla_tk::delta_rule
