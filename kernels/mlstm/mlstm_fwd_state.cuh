// State warpgroups of the mLSTM forward: C in registers, published once per chunk, one block of it after the
// other where that hides it under GEMMs.
#pragma once

#include "config.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

template <class C>
__device__ inline void update_state(const Globals& g, SharedMemoryPlan<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kBlocks = C::kStateBlocks;
    constexpr int kStepTokens = 16;  // of scaled K^T at a time: all that the registers hold
    constexpr int kStepsPerBlock = kChunk / kStepTokens;
    // Where the GEMMs wait for their turn, all of C comes before it: the output reads it before it gives the
    // turn.
    constexpr bool kPublishesUnderGemms = kBlocks == 2 && C::kSchedule == Schedule::overlapped;

    // NOTES: tiles of 64 registers, since a wgmma with N = 256 does not compile in a launch of 512 threads.
    rt_fl<16, C::kPassV> state[kBlocks][C::kPasses];
    const int warp_row = warpgroup_id * 64 + warpgroup::warpid() * 16;  // in every part
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
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            for_each_pass([&](int pass) {
                auto& tile = state[block][pass];
                if (c)
                    load_state(tile, c, warp_row + C::kPartQK * block, task.column + pass * C::kPassV,
                               g.dim_qk, g.dim_v, g.dim_v);
                else
                    warp::zero(tile);
                pin(tile);
            });
    };
    // The sums of a block's scaled keys, for the warp that carries n there. Of four lanes two have a row
    // each: lane / 4, and + 8, of the warp's.
    auto leave_sums = [&](int block, float2 sums, int chunk) {
        const int lane = fresh_laneid();
        // each of two neighbours takes one row and gives the other one away
        const float given = __shfl_xor_sync(0xffffffff, lane % 2 == 0 ? sums.y : sums.x, 1);
        float sum = (lane % 2 == 0 ? sums.x : sums.y) + given;
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const int row = C::kPartQK * block + warp_row + lane / 4 + 8 * (lane % 2);
        const auto stage = C::sum_stage(chunk);
        if (lane % 4 < 2) smem.key_sums[stage.slot][row] = sum;
        arrive_warp(smem.key_sums_ready[stage.slot][block]);
    };
    auto publish = [&](int block, int chunk) {
        for_each_pass([&](int pass) {
            wait_free(smem.state_free[pass][block], chunk & 1);
            const uint32_t panel = shared_address(&smem.state[pass]) +
                                   (block * C::kStateWarpgroups + warpgroup_id) * kStatePanelBytes;
            store_transposed<T>(panel + lane_offset, state[block][pass]);
            fence_async_proxy();
            arrive_warp(smem.state_ready[pass][block]);
        });
    };

    load_initial();
    if (kPublishesUnderGemms) publish(0, 0);
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto value = C::value(chunk);
        const auto stage = C::gate_stage(chunk);
        if (!kPublishesUnderGemms)
#pragma unroll
            for (int block = 0; block < kBlocks; block++) publish(block, chunk);

        wait(smem.gates_ready[stage.slot], stage.phase);
        const GateStage& gates = smem.gates[stage.slot];
        const float decay = gates.decay;
        rt<T, 16, kStepTokens> keys;
        float2 sums;  // of the block's scaled keys, this lane's part
#pragma unroll
        for (int step = 0; step < kBlocks * kStepsPerBlock; step++) {
            const int block = step / kStepsPerBlock, token = step % kStepsPerBlock * kStepTokens;
            const auto key = C::key(chunk, block);
            if (step > 0) {
                warpgroup::mma_async_wait<0>();
                pin(keys);
            }
            if (kPublishesUnderGemms && step == kStepsPerBlock)
                for_each_pass([&](int pass) { pin(state[0][pass]); });
            if (token == 0) {
                wait(smem.qk_arrived[key.slot], key.phase);
                if (decay != 1.f)
                    for_each_pass([&](int pass) {
                        auto& tile = state[block][pass];
                        warp::mul(tile, tile, decay);
                        pin(tile);
                    });
                sums = {0.f, 0.f};
            }
            load_scaled_transposed(
                keys, sums, shared_address(&smem.qk[key.slot]) + warpgroup_id * kPanelBytes + lane_offset,
                gates.key_scale, token);
            if (step == 0) {
                wait(smem.v_arrived[value.slot], value.phase);
                if constexpr (C::kSchedule != Schedule::overlapped)
                    named_sync<C::kTurnThreads>(NamedBarrier::gemm_turn);
            }
            const bool last_of_block = token == kChunk - kStepTokens;
            mma_partial_AB(state[block], keys, smem.v[value.slot], token);
            if (last_of_block) arrive_warp(smem.qk_free[key.slot]);
            if (C::kNormalize && last_of_block) leave_sums(block, sums, chunk);  // under the GEMM
            // under the GEMM of one block the other one's C, as the next reads it
            if (kPublishesUnderGemms && step == 0) publish(1, chunk);
            if (kPublishesUnderGemms && step == kStepsPerBlock && chunk + 1 < task.chunks)
                publish(0, chunk + 1);
        }
        arrive_warp(smem.gates_free[stage.slot]);
        warpgroup::mma_async_wait<0>();
        pin(keys);
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
            for_each_pass([&](int pass) { pin(state[block][pass]); });
        arrive_warp(smem.v_free[value.slot]);
    }

    if (!g.last.c || !task.last) return;
    float* c = g.last.c + task.index * g.dim_qk * g.dim_v;
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
        for_each_pass([&](int pass) {
            store_state(c, state[block][pass], warp_row + C::kPartQK * block, task.column + pass * C::kPassV,
                        g.dim_qk, g.dim_v, g.dim_v);
        });
}

}  // namespace tfla_tk::mlstm
