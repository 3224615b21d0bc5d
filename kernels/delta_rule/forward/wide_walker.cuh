// A walker of the forward (walk.cuh) for K of more than 128, whose state takes half of its registers. X, W,
// U' and O below share an accumulator; S^T is the state. Per chunk:
//   1. Leave S for the backward, where it is wanted. Round S^T to A operands, four steps at a time, and issue
//      X^T = S^T K^T.
//   2. W^T = V^T - e^b X^T; round beta W^T. U'^T = W^T + (beta W^T) A^T.
//   3. Round the operand of S, beta e^{b_L - b} U'^T. Leave U', times `written`, rounded, for the backward,
//      where it is wanted. Round beta U'.
//   4. Round S^T again and issue O^T = S^T Q^T; scale S^T by its decay under the last of it.
//   5. Scale O^T by s e^b.
//   6. Issue O^T += (beta U'^T) P^T and S^T += (beta e^{b_L - b} U'^T) K.
//   7. Wait for O and put it where V was; wait for S and hand the stage over.
// NOTES: the loop's edge is after step 5, where no GEMM is in flight, and S^T is read in the iteration of the
// GEMM that has made it: else ptxas waits for all GEMMs before each read (C7517). Another accumulator for O,
// to round S^T but once, would not leave registers.
#pragma once

#include "delta_rule/forward/config.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_forward_wide(const ForwardGlobals& g, ForwardMemory<C>& smem, int walker) {
    using T = typename C::T;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    rt_fl<16, C::kDimK> state;        // S^T
    rt_fl<16, kChunk> x;              // X^T, then W^T, then U'^T, then O^T
    Fragment fragments[kTokenSteps];  // S^T, rounded
    Fragment tokens[kTokenSteps];     // V^T, then beta W^T, then beta U'^T
    Fragment scaled[kTokenSteps];     // U'^T, scaled

    const WalkTask& task = smem.task;
    const int chunks = task.chunks;
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    auto lane_offset = [] {
        const uint32_t lane = fresh_laneid(), warp = fresh_thread() / 32 % 4;
        return panel_offset(transposed_row(lane), 2 * warp + lane / 8 % 2);
    };
    auto stage_of = [&](int chunk) -> ForwardStage<C>& { return smem.stages[Use<C::kStages>(chunk).slot]; };
    auto values_of = [&](int chunk) {
        return shared_address(&stage_of(chunk).values[walker]) + lane_offset();
    };
    auto pin_each = [](Fragment(&a)[kTokenSteps]) { each<0, kTokenSteps>([&](int j) { pin(a[j]); }); };
    auto wait_arrived = [&](int chunk) {
        const Use<C::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase);
    };

    // d = S^T B^T, rounded four steps at a time. NOTES: d's old value counts as an input: else ptxas gives d
    // other registers and begins while the old ones are still being read, which needs more than there are
    // (C7512).
    auto read_state = [&]<bool one_by_one>(auto& d, const typename C::Tile& tile) {
        const auto rows = Operand128B::rows(&tile);
        const bool never = g.heads == 0;
        each<0, kStateSteps>([&](int k) {
            Fragment& fragment = fragments[k % kTokenSteps];
            if (k >= kTokenSteps)
                warpgroup::mma_async_wait<one_by_one ? 0 : kTokenSteps - 1>(), pin(fragment);
            convert_fragment(fragment, state, k);
            multiply_step<false>(d, fragment, rows.row_step(C::Tile::panel_bytes, k), k > 0 || never, k == 0);
            if constexpr (one_by_one) warpgroup::mma_async_wait<0>();
        });
    };
    auto scale_state = [&](float by) {
        each<0, 4 * kStateSteps>([&](int i) { scale_in_place(state.tiles[0][i / 4].data[i % 4], {by, by}); });
        pin(state);
    };
    // Steps 1 to 5. first: S^T is not of a GEMM.
    auto begin_chunk = [&]<bool first>(int chunk) {
        ForwardStage<C>& stage = stage_of(chunk);
        if (!first && g.borders && is_border(chunk))  // 1
            store_state_transposed(border_state(g, task, task.first_chunk + chunk), state, 0, column(),
                                   g.dim_k, g.dim_v, g.dim_v);
        read_state.template operator()<first>(x, stage.keys);
        load_tokens(tokens, values_of(chunk));
        warpgroup::mma_async_wait<0>();
        pin(x), pin_each(fragments);
        make_writers(tokens, x, FactorsAnew(stage.gates.minus_read), FactorsAnew(stage.gates.beta));  // 2
        add_rows(x, tokens, stage.a);
        scale_state(g.heads > 0 ? 1.f : 0.f);  // NOTES: else ptxas keeps all of the rounded state for step 4
        warpgroup::mma_async_wait<0>();
        pin(x), pin_each(tokens);
        // NOTES: a branch lies between the two: else ptxas makes both at once and spills
        round_scaled(scaled, x, FactorsAnew(stage.gates.update));  // 3
        if (g.keep_writes) {
            round_scaled(tokens, x, FactorsAnew(stage.gates.written));
            wait_free(smem.writes_free[walker], chunk & 1);
            store_transposed(shared_address(&smem.writes[walker]) + lane_offset(), tokens);
            fence_async_proxy();
            arrive_warp(smem.writes_ready[walker]);
        }
        round_scaled(tokens, x, FactorsAnew(stage.gates.beta));
        pin_each(tokens), pin_each(scaled);
        read_state.template operator()<first>(x, stage.queries);  // 4
        scale_state(__uint_as_float(load_anew(shared_address(&stage.gates.decay))));
        warpgroup::mma_async_wait<0>();
        pin(x), pin_each(fragments);
        scale_accumulator(x, FactorsAnew(stage.gates.out));  // 5
        pin(x);
    };
    // Steps 6 and 7.
    auto end_chunk = [&](int chunk) {
        const int slot = Use<C::kStages>(chunk).slot;
        ForwardStage<C>& stage = smem.stages[slot];
        add_rows(x, tokens, stage.p);  // 6
        add_columns(state, scaled, stage.keys);
        warpgroup::mma_async_wait<kTokenSteps>();  // 7
        pin(x), pin_each(tokens);
        // each warp puts it in the place of its own 16 columns of V, which none but it has read
        store_transposed<T>(values_of(chunk), x);
        fence_async_proxy();
        arrive_warp(smem.out_ready[walker][slot]);
        warpgroup::mma_async_wait<0>();
        pin(state), pin_each(scaled);
        arrive_warp(smem.free[slot]);
    };

    if (task.entering)
        load_state_transposed(state, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    else
        warp::zero(state);
    warp::zero(x);
    pin(state), pin(x);
    walk_in_halves(chunks, wait_arrived, begin_chunk, end_chunk);
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
