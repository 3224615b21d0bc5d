// State warpgroups of the forward up to K = 128: C in registers, written to shared memory once per chunk.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/narrow/config.cuh"

namespace tfla_tk::mlstm {

template <class C>
__device__ inline void update_state(const Globals& g, SharedMemoryPlan<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kStepTokens = 16;  // tokens of scaled K^T at a time; registers hold no more

    // NOTES: tiles of 64 registers, since a wgmma with N = 256 does not compile for 512 threads (C7602).
    rt_fl<16, C::kPassV> state[C::kPasses];
    const int warp_row = warpgroup_id * 64 + warpgroup::warpid() * 16;
    constexpr uint32_t kPanelBytes = kChunk * kPanelColumns * sizeof(T);
    constexpr uint32_t kStatePanelBytes = C::StateTile::rows * kPanelColumns * sizeof(T);
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    const Task& task = smem.task;

    auto for_each_pass = [](auto body) {
#pragma unroll
        for (int pass = 0; pass < C::kPasses; pass++) body(pass);
    };
    auto load_initial = [&] {
        const float* c = task.initial_c(g);
        for_each_pass([&](int pass) {
            begin_state(state[pass], c, [&](auto& tile) {
                load_state(tile, c, warp_row, task.column + pass * C::kPassV, g.dim_qk, g.dim_v, g.dim_v);
            });
        });
    };
    // Writes the sums of the scaled keys for the warp of n. Two of every four lanes write one of the warp's
    // rows each: lane / 4, and that + 8.
    auto leave_sums = [&](float2 sums, int chunk) {
        const int lane = fresh_laneid();
        // each of two neighbouring lanes keeps one row and sends the other
        const float given = __shfl_xor_sync(0xffffffff, lane % 2 == 0 ? sums.y : sums.x, 1);
        float sum = (lane % 2 == 0 ? sums.x : sums.y) + given;
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const int row = warp_row + lane / 4 + 8 * (lane % 2);
        const auto stage = C::sum_stage(chunk);
        if (lane % 4 < 2) smem.key_sums[stage.slot][row] = sum;
        arrive_warp(smem.key_sums_ready[stage.slot]);
    };
    auto publish = [&](int chunk) {
        for_each_pass([&](int pass) {
            wait_free(smem.state_free[pass], chunk & 1);
            const uint32_t panel = shared_address(&smem.state[pass]) + warpgroup_id * kStatePanelBytes;
            store_transposed<T>(panel + lane_offset, state[pass]);
            fence_async_proxy();
            arrive_warp(smem.state_ready[pass]);
        });
    };

    load_initial();
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto key = C::key(chunk);
        const auto value = C::value(chunk);
        const auto stage = C::gate_stage(chunk);
        publish(chunk);

        wait(smem.gates_ready[stage.slot], stage.phase);
        const GateStage& gates = smem.gates[stage.slot];
        const float decay = gates.decay;
        rt<T, 16, kStepTokens> keys;
        float2 sums{0.f, 0.f};  // sums of the scaled keys, this lane's part
        wait(smem.qk_arrived[key.slot], key.phase);
        if (decay != 1.f)
            for_each_pass([&](int pass) {
                warp::mul(state[pass], state[pass], decay);
                pin(state[pass]);
            });
#pragma unroll
        for (int token = 0; token < kChunk; token += kStepTokens) {
            if (token > 0) {
                warpgroup::mma_async_wait<0>();
                pin(keys);
            }
            load_scaled_transposed(
                keys, sums, shared_address(&smem.qk[key.slot]) + warpgroup_id * kPanelBytes + lane_offset,
                gates.key_scale, token);
            if (token == 0) {
                wait(smem.v_arrived[value.slot], value.phase);
                if constexpr (kSequential) named_sync<C::kTurnThreads>(NamedBarrier::gemm_turn);
            }
            mma_partial_AB(state, keys, smem.v[value.slot], token);
        }
        arrive_warp(smem.qk_free[key.slot]);
        if constexpr (C::kNormalize) leave_sums(sums, chunk);  // under the GEMM
        arrive_warp(smem.gates_free[stage.slot]);
        warpgroup::mma_async_wait<0>();
        pin(keys);
        for_each_pass([&](int pass) { pin(state[pass]); });
        arrive_warp(smem.v_free[value.slot]);
    }

    if (!g.last.c || !task.last) return;
    float* c = g.last.c + task.index * g.dim_qk * g.dim_v;
    for_each_pass([&](int pass) {
        store_state(c, state[pass], warp_row, task.column + pass * C::kPassV, g.dim_qk, g.dim_v, g.dim_v);
    });
}

}  // namespace tfla_tk::mlstm
