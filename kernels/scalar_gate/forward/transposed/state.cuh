// State warpgroups of the mLSTM forward at K = 256: C^T in registers, h^T = C^T Q^T + V^T P^T, C^T's update.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// 64 columns of V, and nothing of the state goes through shared memory.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/transposed/config.cuh"

namespace tfla_tk::mlstm {

template <class C>
__device__ inline void walk_wide_state(const Globals& g, WideMemory<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kTokenSteps = kChunk / 16;
    const Task& task = smem.task;
    // NOTES: computed anew where needed: the state takes the registers
    auto warp = [] { return fresh_thread() % 128 / 32; };
    auto lane_offset = [&] { return transposed_lane_offset(warp()); };

    rt_fl<16, C::kPart> state[C::kParts];
    rt_fl<16, kChunk> out;
    rt<T, 16, 16> fragments[C::kFragments];    // of C^T, then of V^T
    rt<T, 16, 16> first_values, first_scaled;  // of V^T, made while the last fragments of C^T are read
    ScaledValues<typename C::T2> values;

    auto wait_for_gemms = [&] {
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
        pin(first_values), pin(first_scaled);
#pragma unroll
        for (auto& tile : state) pin(tile);
    };
    auto commit = [&] {
        warpgroup::mma_commit_group();
        if constexpr (C::kSchedule == Schedule::sequential) wait_for_gemms(), pin(out);
    };

    // V^T as it is has three places, loaded a step ahead while two are in GEMMs, and scaled two; where every
    // GEMM is waited for, one each.
    constexpr bool kLoadsAhead = C::kSchedule != Schedule::sequential;
    auto values_of = [&](int step) -> auto& {
        return !kLoadsAhead || step % 3 == 0 ? first_values : fragments[step % 3 - 1];
    };
    auto scaled_values = [&](int step) -> auto& {
        return !kLoadsAhead || step % 2 == 0 ? first_scaled : fragments[2];
    };
    // Which 16 tokens of values and scores a step takes: the last ones first.
    auto sixteen = [](int step) { return kTokenSteps - 1 - step; };
    auto load_values = [&](int slot, int step) {
        load_transposed(
            values_of(step),
            shared_address(smem.values[slot].data[warpgroup_id][16 * sixteen(step)]) + lane_offset());
    };
    // out += V^T P^T over 16 tokens. By halves of the queries, of which the first one sees nothing of tokens
    // in the second.
    auto issue_intra = [&](int step) {
        auto& a = values_of(step);
        pin(a);
        if (step == 0) pin(out);
        const auto scores = Operand128B::rows(&smem.scores);
        auto multiply = [&](auto& queries, int first) {
            constexpr uint32_t kRowBytes = kPanelColumns * sizeof(T);
            wgmma_step<false>(queries, a, 0, scores.at(first * kRowBytes + sixteen(step) * 32));
        };
        wgmma_fence();
        if (sixteen(step) < kTokenSteps / 2) multiply(half_of<0>(out), 0);
        multiply(half_of<1>(out), kChunk / 2);
        commit();
    };
    using Scales = ValueScales<typename C::T2>;
    auto scale_values = [&](int step, const Scales& scales) {
        values.scale(scaled_values(step), values_of(step), scales);
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
    // Each warp of the state, whom eight others precede, has 16 columns of V. NOTES: not by warpgroup_id:
    // kept until the end it costs a register.
    auto for_each_part = [&](auto body) {
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            body(state[part], part * C::kPart, task.column + (fresh_thread() / 32 - 8) * 16);
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
    uint32_t place;  // of h, as transposed_lane_offset has it
    // Returns whether rows of h are still to be divided, and h to be handed over.
    auto walk_chunk = [&](int chunk) {
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
                const Scales scales(gates, sixteen(0));
                wait(smem.values_arrived[slot], phase);
                load_values(slot, 0);
                scale_values(0, scales);
            });
        if constexpr (kLoadsAhead) load_values(slot, 1);
        arrive_warp(smem.queries_free[slot]);
        if (warpgroup_id == 0 || !last_chunk) hand_on_turn();
        wait(smem.scores_ready, chunk & 1);
        issue_update(keys.slot, 0);
        // The output's arithmetic is under the update's GEMMs.
        scale_columns(out, smem.read_factors);
        issue_intra(0);
        bool larger = false;
#pragma unroll
        for (int step = 1; step < kTokenSteps; step++) {
            if constexpr (!kLoadsAhead) load_values(slot, step);
            const Scales scales(gates, sixteen(step));  // NOTES: early: its answer takes a while
            if (step > 1) {
                warpgroup::mma_async_wait<2>();  // all but the last step's two
                pin(values_of(step - 2)), pin(scaled_values(step - 2));
            }
            if (kLoadsAhead && step + 1 < kTokenSteps) load_values(slot, step + 1);
            if (C::kHoldsRowsLarger && step + 2 == kTokenSteps) larger = gates.has_larger_rows;
            if (step + 1 < kTokenSteps)
                scale_values(step, scales), issue_update(keys.slot, step), issue_intra(step);
            else  // h waits for the one of these
                issue_intra(step), scale_values(step, scales), issue_update(keys.slot, step);
        }
        arrive_warp_if(!larger, smem.gates_free[gate_slot]);
        warpgroup::mma_async_wait<1>();  // all but the last one of the update
        pin(out);
#pragma unroll
        for (int step = 1; step < kTokenSteps; step++) pin(values_of(step));
        arrive_warp_in_cta(smem.scores_free, ScoreTurns::maker(chunk + 1));
        // Each warp takes the place of its own columns of V, which none but it has read.
        place = shared_address(smem.values[slot].data[warpgroup_id]) + lane_offset();
        store_transposed<T>(place, out);
        arrive_warp_if(!larger, smem.out_ready[slot][warpgroup_id]);
        chunks = load_anew(shared_address(&task.chunks));  // NOTES: early, since it is asked for at once
        wait_for_gemms();
        arrive_warp(smem.keys_free[keys.slot]);
        if (C::kSchedule == Schedule::sequential && !last_chunk)
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
        return larger;
    };
    int chunk = 0;
    // NOTES: two loops, since ptxas leaves a branch's code where it is, and a jump over what is seldom done
    // costs 1 %. The outer one asks shared memory: without work of its own ptxas takes both for one, and
    // computes in every chunk what it could keep.
    while (chunk < static_cast<int>(load_anew(shared_address(&task.chunks)))) {
        bool larger;
        do larger = walk_chunk(chunk);
        while (++chunk < chunks && !larger);
        if constexpr (C::kHoldsRowsLarger)
            if (larger) {
                const int slot = C::tile(chunk - 1).slot, gate_slot = C::gate_stage(chunk - 1).slot;
                multiply_back(place, smem.gates[gate_slot], !C::Gate::kStabilised);
                arrive_warp(smem.gates_free[gate_slot]);
                arrive_warp(smem.out_ready[slot][warpgroup_id]);
            }
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
