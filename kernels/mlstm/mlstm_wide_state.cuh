// State warpgroups of the mLSTM forward at K = 256: C^T in registers, h^T = C^T Q^T + V^T P^T, C^T's update.
//
// Everything is transposed, so that the state is an operand as it lies in registers: a warpgroup's rows are
// 64 columns of V, and nothing of the state goes through shared memory.
#pragma once

#include "mlstm_wide_config.cuh"
#include "tfla_tk/tiles.cuh"
#include "tfla_tk/wgmma.cuh"

namespace tfla_tk::mlstm {

// (V . key_scale)^T as an A operand. What rounding takes from a token's values is given to those of the token
// eight before, and rounded with them: where keys are alike, as far as queries see, the errors cancel.
// Without it h would be up to a third further off than with scaled keys, whose errors a query averages.
// Backward in time, and not to a token of far less weight, whose key may be so much larger
// (write_scale_and_take).
struct ScaledValues {
    float2 lost[2]{};  // of rows lane / 4 and + 8, at the lane's even and odd tokens

    // 16 tokens from 16 k on. `address`: the values' panel plus transposed_lane_offset.
    template <class A> __device__ inline void load(A& a, uint32_t address, const WideStage& gates, int k) {
        using T2 = typename A::dtype;
        load_transposed(a, address + 16 * k * kPanelColumns * sizeof(typename A::T));
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            asm volatile("" ::: "memory");  // NOTES: factors are loaded when needed: registers
            const float4 both = gates.scale_and_take[8 * k + 4 * half + fresh_laneid() % 4];
            const float2 s{both.x, both.y}, take{both.z, both.w};
#pragma unroll
            for (int row = 0; row < 2; row++) {
                T2& x = a.tiles[0][0].data[2 * half + row];
                const float2 v = to_float2(x);
                const float2 exact{v.x * s.x + take.x * lost[row].x, v.y * s.y + take.y * lost[row].y};
                x = from_float2<T2>(exact);
                const float2 rounded = to_float2(x);
                lost[row] = {exact.x - rounded.x, exact.y - rounded.y};
            }
        }
    }
    // With the state.
    __device__ inline void decay(float by) {
#pragma unroll
        for (auto& x : lost) x = {x.x * by, x.y * by};
    }
};

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
    rt<T, 16, 16> fragments[C::kFragments];  // of state or values: one on its way, the others in a GEMM
    ScaledValues values;

    auto wait_for_gemms = [&] {
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : fragments) pin(a);
#pragma unroll
        for (auto& tile : state) pin(tile);
    };
    auto commit = [&] {
        warpgroup::mma_commit_group();
        if constexpr (C::kSchedule == Schedule::sequential) wait_for_gemms(), pin(out);
    };

    // out += V^T P^T
    auto issue_intra = [&](int slot) {
        issue_columns_by_rows<T, kTokenSteps>(
            out, Operand128B::columns(smem.values[slot].data[warpgroup_id], C::ValueTile::panel_bytes),
            Operand128B::rows(&smem.scores[slot]));
        commit();
    };
    // C^T += (V . key_scale)^T K over 16 tokens, the last ones first
    auto issue_update = [&](int slot, int step, const WideStage& gates) {
        const int k = kTokenSteps - 1 - step;
        auto& a = fragments[step % C::kFragments];
        values.load(a, shared_address(smem.values[slot].data[warpgroup_id]) + lane_offset(), gates, k);
        pin(a);
        if (step == 0)
#pragma unroll
            for (auto& tile : state) pin(tile);
        const auto keys = Operand128B::columns(&smem.keys[slot], C::KeyTile::panel_bytes);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < C::kParts; part++)
            wgmma_step<true>(state[part], a, 0,
                             keys.column_step(k, part * C::kPartPanels * C::KeyTile::panel_bytes));
        commit();
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
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const bool last_chunk = chunk + 1 == task.chunks;
        const auto [slot, phase] = C::tile(chunk);
        const auto stage = C::gate_stage(chunk);
        const auto stored = C::out_stage(chunk);
        const WideStage& gates = smem.gates[stage.slot];
        wait(smem.tiles_arrived[slot], phase);
        wait_for_turn();
        const auto queries = Operand128B::rows(&smem.queries[slot]);
        read_state(
            out, state, fragments, [&](int k) { return queries.row_step(C::QueryTile::panel_bytes, k); },
            commit);
        arrive_warp(smem.queries_free[slot]);
        if (warpgroup_id == 0 || !last_chunk) hand_on_turn();
        if (gates.decay != 1.f) {
#pragma unroll
            for (auto& tile : state) warp::mul(tile, tile, gates.decay);
            values.decay(gates.decay);
        }
        // The update's GEMMs are spread, so that the output's arithmetic is under some of them.
        issue_update(slot, 0, gates);
        wait(smem.scores_ready[slot], phase);
        scale_columns(out, smem.read_scale[slot]);
        issue_update(slot, 1, gates);
        issue_intra(slot);
#pragma unroll
        for (int step = 2; step < kTokenSteps; step++) {
            if (step >= C::kFragments) {
                // for that of step - kFragments; the scores' GEMM is later
                warpgroup::mma_async_wait<C::kFragments>();
                pin(fragments[step % C::kFragments]);
            }
            issue_update(slot, step, gates);
        }
        warpgroup::mma_async_wait<kTokenSteps - 2>();  // the scores' GEMM
        pin(out);
        arrive_warp(smem.values_free[slot]);
        if constexpr (C::kDividesLate)
            if (const int4 late = smem.late[slot]; late.x | late.y | late.z | late.w) {
                // NOTES: under the update ptxas has no registers for it (C7512)
                warpgroup::mma_async_wait<0>();
                scale_columns(out, smem.late_factor[slot]);
            }
        wait_free(smem.out_free[stored.slot][warpgroup_id], stored.phase);
        store_transposed<T>(shared_address(&smem.out[stored.slot][warpgroup_id]) + lane_offset(), out);
        fence_async_proxy();
        arrive_warp(smem.out_ready[stored.slot][warpgroup_id]);
        wait_for_gemms();
        arrive_warp(smem.keys_free[slot]);  // what the next chunk but one waits for
        arrive_warp(smem.gates_free[stage.slot]);
        if (C::kSchedule == Schedule::sequential && !last_chunk)
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
    }

    if (!g.last.c || !task.last) return;
    float* last = g.last.c + task.index * g.dim_qk * g.dim_v;
    for_each_part([&](auto& tile, int row, int column) {
        store_state_transposed(last, tile, row, column, g.dim_qk, g.dim_v, g.dim_v);
    });
}

}  // namespace tfla_tk::mlstm
