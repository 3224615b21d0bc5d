// The walk of the backward that makes dq, dk and dv at once, for K and V up to 128, from the last chunk to
// the first. The forward has left the state that enters every second chunk, so q, k, v and dh are read once.
// One CTA owns a (segment of a sequence, head):
//   producer    loads q, k, v, dh, the gates and the states; stores dq, dk and dv, which take the places of
//               k, q and v; with a normaliser one warp carries dn
//   walkers     with 64 columns of V each, dS in registers: dv (walker.cuh)
//   keys        one warpgroup, off the chain of dS: dq and dk (keys.cuh)
// Where sequences are cut, walk/segment_sums.cuh has made the gradient of the state at the end of each
// segment. Equations: docs/mlstm-backward.md.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/backward/gradients/keys.cuh"
#include "scalar_gate/backward/gradients/producer.cuh"
#include "scalar_gate/backward/gradients/walker.cuh"

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void mlstm_gradients_kernel(const __grid_constant__ GradientsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<GradientsMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if constexpr (C::kNormalizer)  // no load writes channels past K
            if (const int channel = threadIdx.x; channel >= g.dim_k && channel < C::kDimK)
                smem.norm[channel] = 0.f;
        if (!begin_task<C>(g, smem, blockIdx.x, [&] {
                g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.dh.prefetch(), g.states.prefetch();
            }))
            return;
        constexpr auto kRegisters = C::kRegisters;
        if (warpgroup_id == 0) {
            set_registers<kRegisters.producer, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_states(g, smem);
            else if (warp == 1)
                load_gates_and_carry_norm(g, smem);
            else if (warp == 2)
                move_values(g, smem);
            else
                move_keys(g, smem);
        } else if (warpgroup_id <= C::kWalkers) {
            set_registers<kRegisters.walkers, C::kThreads, 1>();
            GradientsWalker<C>(g, smem, warpgroup_id - 1).walk();
        } else {
            set_registers<kRegisters.keys, C::kThreads, 1>();
            GradientsOfKeys<C>{g, smem}.walk();
        }
    }
}

}  // namespace tfla_tk::mlstm
