// One walk of the backward: dq, dk or dv (bindings/params_walk.h).
//
// One CTA owns a (segment of a sequence, head, slice of the values, share of the keys) and walks it in chunks
// of 64 tokens, for dq forward and for dk and dv backward in time; the transposed state stays in registers in
// fp32. Per chunk:
//   producer   loads tiles into rings; one warp applies the deferred decay to the gates (gates.cuh), one
//              loads the factor and stores the gradient, one adds up row sums (output.cuh)
//   scores     S = Q K^T; (S + e) . gate into shared memory. The CTAs of two neighbouring slices each make
//              every second chunk's for both. For dv, on request, row sums of values . factor
//   state      O = state Q^T, scaled; O += values^T scores^T; state = decay state + (values . key_scale)^T K;
//              row sums of O . factor; O replaces the factor
// Where sequences are cut, segment_sums.cuh has made the state at the start of each segment. Equations:
// docs/mlstm-backward.md.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/backward/walk/config.cuh"
#include "scalar_gate/backward/walk/output.cuh"
#include "scalar_gate/backward/walk/producer.cuh"
#include "scalar_gate/backward/walk/scores.cuh"
#include "scalar_gate/backward/walk/state.cuh"

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void mlstm_pass_kernel(const __grid_constant__ PassGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<PassMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

        if (warpgroup_id == 2)
            smem.lane_offsets[threadIdx.x % 128] = transposed_lane_offset(threadIdx.x % 128 / 32);
        begin_task<C>(g, smem, block_of_pass<C>(g, smem), [&] {
            g.queries.prefetch(), g.keys.prefetch(), g.values.prefetch(), g.out.prefetch();
        });
        if (cluster_ctas() > 1) cluster_sync();  // barriers are initialised before the other CTA uses them
        if (smem.task.tokens < 0) return;

        constexpr auto kRegisters = C::kTiling.registers;
        constexpr int kThreads = C::kThreads;
        if (warpgroup_id == 0) {
            set_registers<kRegisters.producer, kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_pass_tiles(g, smem);
            else if (warp == 1)
                feed_gates(g, smem);
            else if (warp == 2)
                load_factor_and_store_outputs(g, smem);
            else if constexpr (C::kSumsRows)
                store_row_sums(g, smem);
        } else if (warpgroup_id == 1) {
            set_registers<kRegisters.scores, kThreads, 1>();
            make_pass_scores(g, smem);
        } else {
            set_registers<kRegisters.state, kThreads, 1>();
            walk_state(g, smem, warpgroup_id - 2);
        }
        if (cluster_ctas() > 1) cluster_sync();  // the other CTA may still write to this one's shared memory
    }
}

}  // namespace tfla_tk::mlstm
