// Fused chunkwise forward at K = 256. Here writing C^T to shared memory as another warpgroup's operand would
// cost more than the GEMMs. So every GEMM of the state is transposed, and its warpgroups read it from their
// own registers.
//
// One CTA owns a (segment of a sequence, head, slice of V) and walks it in chunks of 64 tokens. Per chunk:
//   producer   loads Q and K into rings; two warps scan the gates ahead (gate/gates.cuh); one warp loads V
//              and stores h, which takes V's place
//   scores     S, q n = Q [K, n]^T; P = gate(S) / w into shared memory (w: forward/rows.cuh); then sums of
//              the scaled keys, and n of the next chunk. Two CTAs whose slices are neighbours each make every
//              second chunk's P for both (shared_scores.cuh)
//   state      h^T = C^T Q^T . inter / w + V^T P^T; C^T = decay C^T + (V . key_scale)^T K
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/forward/transposed/config.cuh"
#include "scalar_gate/forward/transposed/producer.cuh"
#include "scalar_gate/forward/transposed/scores.cuh"
#include "scalar_gate/forward/transposed/state.cuh"

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void mlstm_transposed_kernel(const __grid_constant__ Globals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<TransposedMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if (!begin_task<C>(g, smem, blockIdx.x,
                           [&] { g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.chunk.prefetch(); }))
            return;
        if (cluster_ctas() > 1) cluster_sync();  // the other CTA has initialised its barriers

        constexpr auto kRegisters = C::kRegisters;
        if (warpgroup_id == 0) {
            set_registers<kRegisters.producer, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_keys_and_queries(g, smem);
            else if (warp == 1)
                with_gate_of<C>(g, [&]<class P>(P) { sum_transposed_gates<C, P>(g, smem); });
            else if (warp == 2)
                with_gate_of<C>(g, [&]<class P>(P) { scale_transposed_gates<C, P>(g, smem); });
            else
                load_values_and_store_outputs(g, smem);
        } else if (warpgroup_id == 1) {
            set_registers<kRegisters.scores, C::kThreads, 1>();
            make_transposed_scores(g, smem);
        } else {
            set_registers<kRegisters.state, C::kThreads, 1>();
            walk_transposed_state(g, smem, warpgroup_id - 2);
        }
        if (cluster_ctas() > 1) cluster_sync();  // the other CTA may still write to this one's shared memory
    }
}

}  // namespace tfla_tk::mlstm
