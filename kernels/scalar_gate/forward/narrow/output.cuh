// Output warpgroup of the forward up to K = 128: scores, gate, both products, normaliser, store.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/narrow/config.cuh"
#include "scalar_gate/forward/rows.cuh"

namespace tfla_tk::mlstm {

// P = S 2^{column - row}, causal, rounded; `sums` becomes its row sums before rounding.
template <class P, class Scores>
__device__ inline void gate_scores(P& p, const Scores& s, float2& sums, const GateStage& gates, int row) {
    ScoreGate gate(gates, row, laneid(), {0.f, 0.f});
#pragma unroll
    for (int j = 0; j < Scores::width; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 upper = s.tiles[0][j].data[2 * half], lower = s.tiles[0][j].data[2 * half + 1];
            gate.apply(upper, lower, gates, 16 * j + 8 * half);
            p.tiles[0][j].data[2 * half] = from_float2<typename P::dtype>(upper);
            p.tiles[0][j].data[2 * half + 1] = from_float2<typename P::dtype>(lower);
        }
    }
    sums = gate.row_sums();
}

template <class C> __device__ inline void compute_output(const Globals& g, SharedMemoryPlan<C>& smem) {
    using T = typename C::T;
    const Task& task = smem.task;
    const int warp_row = warpgroup::warpid() * 16;
    const int row = warp_row + laneid() / 4;  // this thread owns rows `row` and `row + 8`

    rt_fl<16, kChunk> scores;
    rt<T, 16, kChunk> p;
    // the output's columns and 16 more, of which two are q times the high and the low part of n
    rt_fl<16, C::kPassV + C::kNormRows> out_and_qn;
    auto& out = reinterpret_cast<rt_fl<16, C::kPassV>&>(out_and_qn);
    auto& qn = reinterpret_cast<rt_fl<16, 16>&>(out_and_qn.tiles[0][C::kNormalize ? C::kPassV / 16 : 0]);
    const auto& qn_parts = qn.tiles[0][0].data;  // valid in the first lane of every four: row, then row + 8

    auto issue_scores = [&](int chunk) {
        const auto key = C::key(chunk), query = C::query(chunk);
        wait(smem.qk_arrived[key.slot], key.phase);
        wait(smem.qk_arrived[query.slot], query.phase);
        forget(scores);
        warpgroup::mm_ABt(scores, smem.qk[query.slot], smem.qk[key.slot]);
    };
    // NOTES: also called after the last chunk, without scores in flight; without that wait ptxas serialises
    // (C7511).
    auto finish_scores = [&](int chunk, auto none_constant) {
        warpgroup::mma_async_wait<0>();
        pin(scores);
        if constexpr (!decltype(none_constant)::value) arrive_warp(smem.qk_free[C::key(chunk).slot]);
    };
    // Issues Q C; in the first column half Q [C, n].
    auto issue_inter = [&](int pass, int chunk) {
        constexpr uint32_t kStatePanelBytes = C::StateTile::rows * kPanelColumns * sizeof(T);
        const auto state = Operand128B::rows(&smem.state[pass]);
        wait(smem.state_ready[pass], chunk & 1);
        forget(out);
        if (C::kNormalize && pass == 0) forget(qn);
        wgmma_fence();
        const auto q = Operand128B::rows(&smem.qk[C::query(chunk).slot]);
#pragma unroll
        for (int k = 0; k < C::kDimQK / 16; k++) {
            const uint64_t a = q.row_step(kChunk * kPanelColumns * sizeof(T), k);
            const uint64_t b = state.row_step(kStatePanelBytes, k);
            if (C::kNormalize && pass == 0)
                wgmma_step<T, false>(out_and_qn, a, b, k > 0);
            else
                wgmma_step<T, false>(out, a, b, k > 0);
        }
        warpgroup::mma_commit_group();
    };
    // Waits for Q C and frees C^T; the last column half frees Q.
    auto finish_inter = [&](int pass, int chunk) {
        warpgroup::mma_async_wait<0>();
        pin(out);
        if (C::kNormalize && pass == 0) pin(qn);
        if (pass == C::kPasses - 1) arrive_warp(smem.qk_free[C::query(chunk).slot], C::kQueryArrivals);
        arrive_warp(smem.state_free[pass]);
    };
    auto store_out = [&](int pass, int chunk) {
        const uint32_t panels = shared_address(&smem.out);
        if (laneid() == 0) wait_stores_read();
        __syncwarp();
        store_panels<T, kChunk>(panels, warp_row, out);
        fence_async_proxy();
        __syncwarp();
        if (laneid() != 0) return;
        auto store = [&](const TensorMap& map, int r) {
#pragma unroll
            for (int panel = 0; panel < C::kPassV / kPanelColumns; panel++)
                map.store_panel(panels + (panel * kChunk + warp_row + r) * kPanelColumns * sizeof(T),
                                task.column + pass * C::kPassV + panel * kPanelColumns,
                                task.first_row + chunk * kChunk + warp_row + r, task.head, task.batch);
        };
        if (const int rows = task.tokens - chunk * kChunk - warp_row; g.packed() && rows < 16)
#pragma unroll 1
            for (int r = 0; r < rows; r++) store(g.h.row, r);  // a box would reach into the next sequence
        else
            store(g.h.box, 0);
        commit_stores();
    };
    auto scale_rows = [&](float2 factor) {
        for_each_pair(out, 0, 0, [&](float2& x, int r, int) {
            const float s = r >= laneid() / 4 + 8 ? factor.y : factor.x;
            x = {x.x * s, x.y * s};
        });
    };

    auto step = [&](int chunk, auto last_constant) {
        constexpr bool kLast = decltype(last_constant)::value;
        const auto stage = C::gate_stage(chunk);
        const auto value = C::value(chunk);
        const GateStage& gates = smem.gates[stage.slot];
        float2 intra, final_scale;

        wait(smem.gates_ready[stage.slot], stage.phase);
        if constexpr (!kSequential) issue_inter(0, chunk);
        gate_scores(p, scores, intra, gates, row);  // under Q C
        if constexpr (kSequential) issue_inter(0, chunk);
        finish_inter(0, chunk);
        const float2 inter{gates.inter[row], gates.inter[row + 8]};

#pragma unroll
        for (int pass = 0; pass < C::kPasses; pass++) {
            const bool last_pass = pass == C::kPasses - 1;
            if (pass > 0) {
                issue_inter(pass, chunk);
                finish_inter(pass, chunk);
            }
            scale_rows(inter);
            if (pass == 0) wait(smem.v_arrived[value.slot], value.phase);
            warpgroup::mma_AB(out, p, smem.v[value.slot].template subtile<C::kPassV>(pass));
            constexpr int kScoresInFlight = !kSequential && !kLast;
            if (kScoresInFlight > 0 && last_pass) issue_scores(chunk + 1);  // under this chunk's epilogue
            if (pass == 0) {
                float2 qn_rows{0.f, 0.f};
                if constexpr (C::kNormalize)
                    qn_rows = {of_first_lane(qn_parts[0].x + qn_parts[0].y),
                               of_first_lane(qn_parts[1].x + qn_parts[1].y)};
                const float2 sums{intra.x + inter.x * qn_rows.x, intra.y + inter.y * qn_rows.y};
                const float2 unit{gates.unit[row], gates.unit[row + 8]};
                final_scale =
                    row_factor<C>(g, task, chunk, unit, row, sums, [&] { return task.column == 0; });
            }
            if (last_pass)
                warpgroup::mma_async_wait<kScoresInFlight>();
            else
                warpgroup::mma_async_wait<0>();
            pin(p);
            pin(out);
            scale_rows(final_scale);
            store_out(pass, chunk);
        }
        arrive_warp(smem.v_free[value.slot]);
        arrive_warp(smem.gates_free[stage.slot]);
        if constexpr (kSequential) {
            named_arrive<C::kTurnThreads>(NamedBarrier::gemm_turn);
            if constexpr (!kLast) issue_scores(chunk + 1);
        }
        finish_scores(chunk + 1, last_constant);
    };

    issue_scores(0);
    finish_scores(0, std::false_type{});
    for (int chunk = 0; chunk + 1 < task.chunks; chunk++) step(chunk, std::false_type{});
    step(task.chunks - 1, std::true_type{});
    if (laneid() == 0) wait_stores_read();
}

}  // namespace tfla_tk::mlstm
