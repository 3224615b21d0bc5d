// A walker of the mirror walk (walk.cuh) for K of more than 128, whose state takes half of its registers;
// backward in time. dU and dY share an accumulator; the state is dS^T. Per chunk:
//   1. Leave dS for the walks over the states, where it is wanted. Round dS^T to A operands, four steps at a
//      time, and issue X^T = dS^T K^T; scale dS^T by its decay under the last of them.
//   2. Load dO^T. Scale X^T by e^{b_L - b} and issue dU^T = X^T + dO^T P.
//   3. Round beta dU^T to A operands and issue dY^T = dU^T + (beta dU^T) A. Scale dO^T by s e^b and
//      issue dS^T += dO^T Q.
//   4. Wait for dY. Round -e^b beta dY^T to A operands and issue dS^T += dY^T K.
//   5. Under it put dV = beta dY in the place of dO. Store sums for dbeta: dY . writes over the warp's 16
//      columns of V, divided by `written`.
//   6. Wait for dS; hand the stage over.
// NOTES: the loop's edge is after step 2, where no GEMM is in flight, and dS^T is read in the iteration of
// the GEMM that has made it: else ptxas waits for all GEMMs before each read (C7517).
#pragma once

#include "delta_rule/backward/config.cuh"
#include "delta_rule/backward/token_sums.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_mirror_wide(const MirrorGlobals& g, MirrorMemory<C>& smem, int walker) {
    using T = typename C::T;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    rt_fl<16, C::kDimK> state;        // dS^T
    rt_fl<16, kChunk> x;              // X^T, then dU^T, then dY^T
    Fragment fragments[kTokenSteps];  // dS^T, rounded; then beta dU^T, then -e^b beta dY^T
    Fragment tokens[kTokenSteps];     // dO^T, as it is and scaled; then the writes

    const WalkTask& task = smem.task;
    const int chunks = task.chunks;
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());
    auto pin_each = [](Fragment(&a)[kTokenSteps]) { each<0, kTokenSteps>([&](int j) { pin(a[j]); }); };
    auto wait_arrived = [&](int step) {
        const Use<C::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase);
    };

    // Steps 1 and 2. first: dS^T is not of a GEMM.
    auto begin_chunk = [&]<bool first>(int step) {
        const int slot = Use<C::kStages>(step).slot;
        MirrorStage<C>& stage = smem.stages[slot];
        const MirrorGates<C>& gates = smem.gates[slot];
        if (!first && g.borders && is_border(chunks - step))  // 1
            store_state_transposed(border_state(g, task, task.first_chunk + chunks - step), state, 0,
                                   column(), g.dim_k, g.dim_v, g.dim_v);
        const auto keys = Operand128B::rows(&stage.keys);
        forget(x);
        each<0, kStateSteps>([&](int k) {
            Fragment& fragment = fragments[k % kTokenSteps];
            if (k >= kTokenSteps) warpgroup::mma_async_wait<first ? 0 : kTokenSteps - 1>(), pin(fragment);
            convert_fragment(fragment, state, k);
            multiply_step<false>(x, fragment, keys.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
            if constexpr (first) warpgroup::mma_async_wait<0>();
        });
        const float decay = __uint_as_float(load_anew(shared_address(&gates.decay)));
        each<0, 4 * kStateSteps>(
            [&](int i) { scale_in_place(state.tiles[0][i / 4].data[i % 4], {decay, decay}); });
        pin(state);
        load_tokens(tokens, shared_address(&stage.douts[walker]) + lane_offset);  // 2
        warpgroup::mma_async_wait<0>();
        pin(x), pin_each(fragments);
        scale_accumulator(x, FactorsAnew(gates.update));
        add_columns(x, tokens, stage.p);
        warpgroup::mma_async_wait<0>();
        pin(x), pin_each(tokens);
    };
    // Steps 3 to 6.
    auto end_chunk = [&](int step) {
        const int chunk = chunks - 1 - step, slot = Use<C::kStages>(step).slot;
        MirrorStage<C>& stage = smem.stages[slot];
        const MirrorGates<C>& gates = smem.gates[slot];
        round_scaled(fragments, x, FactorsAnew(gates.beta));  // 3
        add_columns(x, fragments, stage.a);
        scale_fragments(tokens, FactorsAnew(gates.out));
        add_columns(state, tokens, stage.queries);
        warpgroup::mma_async_wait<kTokenSteps>();  // 4
        pin(x), pin_each(fragments);
        round_scaled(fragments, x, FactorsAnew(gates.minus_read));
        add_columns(state, fragments, stage.keys, false);
        warpgroup::mma_async_wait<kTokenSteps>();  // 5
        pin_each(tokens);
        load_tokens(tokens, shared_address(&stage.writes[walker]) + lane_offset);
        if (column() < g.dim_v) {
            auto [token, of] = token_sums(fresh_laneid(), [&](int j, int k) {
                const float2 u = to_float2(tokens[j].tiles[0][0].data[k]), dy = x.tiles[0][j].data[k];
                return float2{u.x * dy.x, u.y * dy.y};
            });
            auto written = [&](int token) {
                return written_part(gates.beta.of(token), gates.update.of(token));
            };
            of = {1.f / written(token) * of.x, 1.f / written(token + 1) * of.y};
            const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
            float* const to = g.strengths + column() / kSumColumns * g.rows + head * g.seq + task.first_row;
            TwoSums{token, of}.store(to + chunk * kChunk, task.tokens - chunk * kChunk);
        }
        scale_accumulator(x, FactorsAnew(gates.beta));
        // each warp puts it in the place of its own 16 columns of dO, which none but it has read
        store_transposed<T>(shared_address(&stage.douts[walker]) + lane_offset, x);
        fence_async_proxy();
        arrive_warp(smem.out_ready[walker][slot]);
        warpgroup::mma_async_wait<0>();  // 6
        pin(state), pin_each(fragments);
        arrive_warp(smem.free[slot]);
    };

    begin_state(state, task.entering, [&](auto& tile) {
        load_state_transposed(tile, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    });
    walk_in_halves(chunks, wait_arrived, begin_chunk, end_chunk);
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
