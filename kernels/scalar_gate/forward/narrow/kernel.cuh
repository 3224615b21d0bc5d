// Fused chunkwise forward up to K = 128.
//
// One CTA owns a (segment of a sequence, head, slice of V) and walks it in chunks of 64 tokens. The state C
// stays in the registers of the state warpgroups in fp32 and is not written to global memory between chunks.
// Per chunk:
//   producer   loads K, Q, V tiles into rings; a second warp scans the gates ahead (gate/gates.cuh); a third
//              writes n below C^T and carries it on with the sums of the scaled keys; a fourth leaves C^T for
//              the backward, where it is wanted
//   state      writes C^T, rounded, to shared memory for Q C; then C = decay C + (key_scale . K)^T V
//   output     S = Q K^T; O, q n = Q [C, n]; P = gate(S); O = inter . O + P V; h = O / max(|q n|, floor); TMA
//              store
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/forward/narrow/config.cuh"
#include "scalar_gate/forward/narrow/normaliser.cuh"
#include "scalar_gate/forward/narrow/output.cuh"
#include "scalar_gate/forward/narrow/producer.cuh"
#include "scalar_gate/forward/narrow/state.cuh"

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTiling.ctas_per_sm) void mlstm_fwd_kernel(
    const __grid_constant__ Globals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

        if (!begin_task<C>(g, smem, blockIdx.x,
                           [&] { g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.box.prefetch(); }))
            return;

        if (warpgroup_id == 0) {
            warpgroup::decrease_registers<C::kTiling.registers.producer>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_tiles(g, smem);
            else if (warp == 1)
                with_gate_of_kernel<C::kNormalize>(g.gate_kind,
                                                   [&]<class P>(P) { scan_gates<C, P>(g, smem); });
            else if (C::kNormalize && warp == 2)
                carry_norm(g, smem);
            else if constexpr (C::kPasses == 1)
                if (warp == 3 && smem.task.leaves_states()) leave_states(g, smem);
        } else if (warpgroup_id <= C::kStateWarpgroups) {
            warpgroup::increase_registers<C::kTiling.registers.state>();
            update_state(g, smem, warpgroup_id - 1);
        } else {
            warpgroup::increase_registers<C::kTiling.registers.output>();
            if (smem.task.tokens > 0) compute_output(g, smem);
        }
    }
}

}  // namespace tfla_tk::mlstm
