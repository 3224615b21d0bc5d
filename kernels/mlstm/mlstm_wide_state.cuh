// State warpgroups of the mLSTM forward at K = 256: C^T in registers, h^T = C^T Q^T + V^T P^T, C^T's update.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// 64 columns of V, and nothing of the state goes through shared memory.
#pragma once

#include "mlstm_wide_config.cuh"
#include "tfla_tk/tiles.cuh"
#include "tfla_tk/wgmma.cuh"

namespace tfla_tk::mlstm {

template <class C>
__device__ inline void walk_wide_state(const Globals& g, WideMemory<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kReadSteps = C::kDimQK / 16, kTokenSteps = kChunk / 16;
    const Task& task = smem.task;
    // NOTES: computed anew where needed: the state takes the registers
    auto warp = [] { return fresh_thread() % 128 / 32; };
    auto lane_offset = [&] { return transposed_lane_offset(warp()); };

    rt_fl<16, C::kPart> state[C::kParts];
    rt_fl<16, kChunk> out;
    rt<T, 16, 16> value_fragments[C::kValueFragments];  // of V^T
    rt<T, 16, 16> fragments[C::kFragments];             // of C^T or of scaled V^T
    ScaledValues<typename C::T2> values;

    auto wait_for_gemms = [&] {
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
#pragma unroll
        for (auto& a : value_fragments) pin(a);
#pragma unroll
        for (auto& tile : state) pin(tile);
    };
    auto commit = [&] {
        warpgroup::mma_commit_group();
        if constexpr (C::kSchedule == Schedule::sequential) wait_for_gemms(), pin(out);
    };

    // The fragments go on in turn after those that read the state.
    auto scaled_values = [&](int step) -> auto& { return fragments[(kReadSteps + step) % C::kFragments]; };
    // Which 16 tokens of values and scores a step takes: the last ones first.
    auto sixteen = [](int step) { return kTokenSteps - 1 - step; };
    auto load_values = [&](int slot, int step) {
        load_transposed(
            value_fragments[step % C::kValueFragments],
            shared_address(smem.values[slot].data[warpgroup_id][16 * sixteen(step)]) + lane_offset());
    };
    // out += V^T P^T over 16 tokens
    auto issue_intra = [&](int step) {
        auto& a = value_fragments[step % C::kValueFragments];
        pin(a);
        if (step == 0) pin(out);
        wgmma_fence();
        wgmma_step<false>(out, a, 0, Operand128B::rows(&smem.scores).row_step(0, sixteen(step)));
        commit();
    };
    auto scale_values = [&](int step, const typename C::Stage& gates) {
        values.scale(scaled_values(step), value_fragments[step % C::kValueFragments], gates, sixteen(step));
    };
    // C^T += (V . key_scale)^T K over 16 tokens
    auto issue_update = [&](int key_slot, int step) {
        auto& a = scaled_values(step);
        pin(a);
        if (step == 0)
#pragma unroll
            for (auto& tile : state) pin(tile);
        const auto keys = Operand128B::columns(&smem.keys[key_slot], C::KeyTile::panel_bytes);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            wgmma_step<true>(
                state[part], a, 0,
                keys.column_step(sixteen(step), part * C::kPartPanels * C::KeyTile::panel_bytes));
        commit();
    };
    // What the lane's two of eight queries are multiplied with, from factors of 16 on.
    auto factors_of = [&](const float (&rows)[16], int half) {
        return *reinterpret_cast<const float2*>(&rows[8 * half + 2 * (fresh_laneid() % 4)]);
    };
    // Returns whether a row is still to be divided.
    auto scale_reading = [&] {
        int signs = 0;  // all of 16 rows have the same, NaN too: so all lanes come to the same
        scale_column_pairs(out, [&](int j, int half) {
            const float2 x = factors_of(smem.row_factors[j].read, half);
            if constexpr (!C::kDividesLate) return x;
            if (half == 0) signs |= __float_as_int(x.x);
            return float2{fabsf(x.x), fabsf(x.y)};
        });
        return C::kDividesLate && signs < 0;
    };
    auto divide_late = [&] {
        if constexpr (C::kDividesLate)
            scale_column_pairs(out,
                               [&](int j, int half) { return factors_of(smem.row_factors[j].late, half); });
    };
    auto for_each_part = [&](auto body) {
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            body(state[part], part * C::kPart, task.column + warpgroup_id * 64 + warp() * 16);
    };

    // The turns at reading the state, of two state warpgroups.
    constexpr bool kTakesTurns = C::kSchedule == Schedule::pingpong && C::kStateWarpgroups == 2;
    auto wait_for_turn = [&] {
        if constexpr (kTakesTurns) named_sync<128 * 2>(NamedBarrier::read_turn, warpgroup_id);
    };
    auto hand_on_turn = [&] {
        if constexpr (kTakesTurns) named_arrive<128 * 2>(NamedBarrier::read_turn, 1 - warpgroup_id);
    };

    const float* initial = task.initial_c(g);
    for_each_part([&](auto& tile, int row, int column) {
        if (initial)
            load_state_transposed(tile, initial, row, column, g.dim_qk, g.dim_v, g.dim_v);
        else
            warp::zero(tile);
        pin(tile);
    });

    if (warpgroup_id == 1 && task.chunks > 0) hand_on_turn();
    int chunks = task.chunks;
    for (int chunk = 0; chunk < chunks; chunk++) {
        const bool last_chunk = chunk + 1 == task.chunks;
        const auto [slot, phase] = C::tile(chunk);
        const auto keys = C::key_tile(chunk);
        const int gate_slot = C::gate_stage(chunk).slot;
        const typename C::Stage& gates = smem.gates[gate_slot];
        wait(smem.tiles_arrived[keys.slot], keys.phase);
        wait_for_turn();
        const auto queries = Operand128B::rows(&smem.queries[slot]);
        read_state(
            out, state, fragments, [&](int k) { return queries.row_step(C::QueryTile::panel_bytes, k); },
            commit,
            [&] {
                if (gates.decay != 1.f) {
#pragma unroll
                    for (auto& tile : state) warp::mul(tile, tile, gates.decay);
                    values.decay(gates.decay);
                }
                wait(smem.values_arrived[slot], phase);
                load_values(slot, 0);
                scale_values(0, gates);
            });
        arrive_warp(smem.queries_free[slot]);
        if (warpgroup_id == 0 || !last_chunk) hand_on_turn();
        wait(smem.scores_ready, chunk & 1);
        issue_update(keys.slot, 0);
        // The output's arithmetic is under the update's GEMMs.
        const bool late = scale_reading();
        issue_intra(0);
#pragma unroll
        for (int step = 1; step < kTokenSteps; step++) {
            if (step >= C::kValueFragments) {
                constexpr int kLater = 2 * (C::kValueFragments - 1);  // two GEMMs a step
                warpgroup::mma_async_wait<kLater>();
                pin(value_fragments[step % C::kValueFragments]);
                pin(scaled_values(step - C::kValueFragments));
            }
            load_values(slot, step);
            if (step + 1 < kTokenSteps)
                scale_values(step, gates), issue_update(keys.slot, step), issue_intra(step);
            else  // h waits for the one of these
                issue_intra(step), scale_values(step, gates), issue_update(keys.slot, step);
        }
        arrive_warp(smem.gates_free[gate_slot]);
        warpgroup::mma_async_wait<1>();  // all but the last one of the update
        pin(out);
#pragma unroll
        for (auto& a : value_fragments) pin(a);
        if (late) {
            // NOTES: under the update ptxas has no registers for it (C7512)
            warpgroup::mma_async_wait<0>();
            divide_late();
        }
        arrive_warp_in_cta(smem.scores_free, ScoreTurns::maker(chunk + 1));
        // Each warp takes the place of its own columns of V, which none but it has read.
        store_transposed<T>(shared_address(smem.values[slot].data[warpgroup_id]) + lane_offset(), out);
        chunks = load_anew(shared_address(&task.chunks));  // NOTES: early, since it is asked for at once
        wait_for_gemms();
        arrive_warp(smem.keys_free[keys.slot]);
        fence_async_proxy();
        arrive_warp(smem.out_ready[slot][warpgroup_id]);
        if (C::kSchedule == Schedule::sequential && !last_chunk)
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
    }

    if (!g.last.c || !task.last) return;
    float* last = g.last.c + task.index * g.dim_qk * g.dim_v;
    const float unit = last_unit<C>(smem);
    for_each_part([&](auto& tile, int row, int column) {
        if constexpr (C::Owed::kFollowsWeights) warp::mul(tile, tile, unit);
        store_state_transposed(last, tile, row, column, g.dim_qk, g.dim_v, g.dim_v);
    });
}

}  // namespace tfla_tk::mlstm
