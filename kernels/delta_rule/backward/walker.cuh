// A walker of the mirror walk (walk.cuh), backward in time. dU and dY share an accumulator; the state is
// dS^T. Per chunk:
//   1. Load dO^T. Round dS^T to A operands, then scale it by its decay. NOTES: before the first GEMM: ptxas
//      does not follow a GEMM's accumulators over the loop's edge while another GEMM is in flight (C7517).
//   2. Issue (P^T dO)^T = dO^T P and X^T = dS^T K^T.
//   3. Wait for dO^T P. Scale dO^T by s e^b and issue dS^T += dO^T Q.
//   4. Wait for X. dU^T = e^{b_L - b} X^T + (P^T dO)^T in the place of X^T; round beta dU^T.
//   5. Issue dY^T = dU^T + (beta dU^T) A.
//   6. Wait for dY and dS.
//   7. Round -e^b beta dY^T to A operands and issue dS^T += dY^T K.
//   8. Under it put dV = beta dY in the place of dO. Leave sums for dbeta: dY . writes over the warp's 16
//      columns of V, divided by `written`. The producer adds up those of the walker.
//   9. Wait for dS; hand the stage over.
// A walk that leaves states alone has no step 8. One that makes the right part of dk (right_part.cuh) hands
// on dS^T in step 1 and makes that part before step 9. If it leaves the sums for dg, step 7 also adds what
// rounding has dropped of s e^b dO^T, since the left walk sums products with exact factors (sums.cuh). What
// was dropped is found under the GEMMs of step 5.
#pragma once

#include "delta_rule/backward/config.cuh"
#include "delta_rule/backward/right_part.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__device__ inline void walk_mirror(const MirrorGlobals& g, MirrorMemory<C>& smem, int walker) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    constexpr int kStateSteps = C::kDimK / 16, kTokenSteps = kChunk / 16;
    rt_fl<16, C::kDimK> state;     // dS^T
    rt_fl<16, kChunk> x, through;  // X^T, then dU^T, then dY^T; (P^T dO)^T
    Fragment read[kStateSteps];    // dS^T, rounded; then beta dU^T, then -e^b beta dY^T
    Fragment tokens[kTokenSteps];  // dO^T, as it is and scaled; then the writes
    static_assert(kStateSteps >= kTokenSteps);
    auto rounded = [&](int j) -> Fragment& { return read[j]; };

    const WalkTask& task = smem.task;
    const int chunks = task.chunks;
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());

    // Until no more than the last kSteps of all issued ones run.
    auto wait_but = [&]<int kSteps>() { warpgroup::mma_async_wait<std::min(kSteps, 7)>(); };
    auto pin_rounded = [&] { each<0, kTokenSteps>([&](int j) { pin(rounded(j)); }); };
    // d (+)= fragments(j) B, B's columns are N
    auto multiply_square = [&](auto& d, auto fragment, const typename C::Square& square, bool accumulate) {
        const auto columns = Operand128B::columns(&square, C::Square::panel_bytes);
        each<0, kTokenSteps>([&](int j) {
            multiply_step<true>(d, fragment(j), columns.column_step(j), accumulate || j > 0, j == 0);
        });
    };
    // state += fragments(j) B
    auto add_to_state = [&](auto fragment, const typename C::Tile& tile, bool first = true) {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        each<0, kTokenSteps>([&](int j) {
            multiply_step<true>(state, fragment(j), columns.column_step(j), true, first && j == 0);
        });
    };
    auto token = [&](int j) -> Fragment& { return tokens[j]; };
    auto load_tokens = [&](auto& to, const typename C::Columns& tile) {
        const uint32_t address = shared_address(&tile) + lane_offset;
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(to[j], address + 16 * j * kPanelColumns * sizeof(T)); });
    };
    auto store_tokens = [&](typename C::Columns& tile, const rt_fl<16, kChunk>& values) {
        store_transposed<T>(shared_address(&tile) + lane_offset, values);
    };
    auto scale_tokens = [&](auto& values, const auto& by, auto part) {
        each<0, kTokenSteps>([&](int j) {
            each<0, 4>([&](int k) {
                T2& pair = values[j].tiles[0][0].data[k];
                const float2 x = to_float2(pair), e = by.of(j).of[k / 2];
                pair = from_float2<T2>(part(float2{e.x * x.x, e.y * x.y}));
            });
        });
    };

    auto walk_chunk = [&](int step) {
        const int chunk = chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        const MirrorGates<C>& gates = smem.gates[slot];
        load_tokens(tokens, stage.douts[walker]);  // 1
        pin_all(tokens);
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
        if constexpr (C::kMakesRight) share_gradient(smem, read);
        warp::mul(state, state, gates.decay);
        pin(state);
        forget(through);  // 2
        multiply_square(through, token, stage.p, false);
        forget(x);
        const auto keys = Operand128B::rows(&stage.keys);
        each<0, kStateSteps>([&](int k) {
            multiply_step<false>(x, read[k], keys.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
        const LaneFactors out(gates.out, fresh_laneid());
        wait_but.template operator()<kStateSteps>();  // 3
        pin(through), pin_all(tokens);
        scale_tokens(tokens, out, [](float2 x) { return x; });
        add_to_state(token, stage.queries);
        // NOTES: two walkers have no registers to read both ahead
        constexpr bool kAhead = C::kWalkers == 1;
        const LaneFactors update(gates.update, fresh_laneid());
        const std::conditional_t<kAhead, LaneFactors, LateFactors> beta(gates.beta, fresh_laneid());
        wait_but.template operator()<kTokenSteps>();  // 4
        pin(x), pin_all(read);
        each<0, kTokenSteps>([&](int j) {
            const auto betas = beta.of(j);
            each<0, 4>([&](int k) {
                float2& du = x.tiles[0][j].data[k];
                fma_in_place(du, update.of(j).of[k / 2], through.tiles[0][j].data[k]);
                const float2 by = betas.of[k / 2];
                rounded(j).tiles[0][0].data[k] = from_float2<T2>({by.x * du.x, by.y * du.y});
            });
        });
        multiply_square(x, rounded, stage.a, true);  // 5
        std::conditional_t<C::kMakesSums, Fragment[kTokenSteps], Nothing> rest;
        if constexpr (C::kMakesSums) {
            load_tokens(rest, stage.douts[walker]);
            scale_tokens(rest, LateFactors(gates.out, fresh_laneid()), [](float2 x) {
                const float2 high = to_float2(from_float2<T2>(x));
                return float2{x.x - high.x, x.y - high.y};
            });
            pin_all(rest);
        }
        const LaneFactors minus_read(gates.minus_read, fresh_laneid());
        warpgroup::mma_async_wait<0>();  // 6
        pin(x), pin(state), pin_all(tokens), pin_rounded();
        each<0, kTokenSteps>([&](int j) {  // 7
            each<0, 4>([&](int k) {
                const float2 z = x.tiles[0][j].data[k], e = minus_read.of(j).of[k / 2];
                rounded(j).tiles[0][0].data[k] = from_float2<T2>({e.x * z.x, e.y * z.y});
            });
        });
        add_to_state(rounded, stage.keys);
        if constexpr (C::kMakesSums)
            add_to_state([&](int j) -> Fragment& { return rest[j]; }, stage.queries, false);
        auto pin_own = [&] {
            pin(state), pin_rounded();
            if constexpr (C::kMakesSums) pin_all(rest);
        };
        if constexpr (!C::kStatesAlone) {
            load_tokens(tokens, stage.writes[walker]);  // 8
            const TwoSums sums =
                strength_sums(gates, [&](int j, int k) { return KeySteps<C>::product(tokens[j], x, j, k); });
            // NOTES: recomputed, to save registers
            const int own_walker = fresh_thread() / 128 - 1, own_warp = fresh_thread() / 32 % 4;
            stage.strengths[own_walker].write(own_warp, sums);
            each<0, kTokenSteps>([&](int j) {
                const auto factors = gates.beta.columns(j, fresh_laneid());
                each<0, 4>([&](int k) { scale_in_place(x.tiles[0][j].data[k], factors.of[k / 2]); });
            });
            store_tokens(stage.douts[walker], x);
            if constexpr (C::kMakesRight)
                make_right_part(g, smem, slot, chunk, pin_own);
            else
                fence_async_proxy();
            arrive_warp(smem.out_ready[walker][slot]);
        }
        warpgroup::mma_async_wait<0>();  // 9
        if constexpr (!C::kMakesRight) pin_own();
        arrive_warp(smem.free[slot]);
    };

    if (task.entering)
        load_state_transposed(state, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    else
        warp::zero(state);
    pin(state);
    for (int step = 0; step < chunks; step++) {
        const Use<C::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase);
        if (!C::kStatesAlone && g.borders && step > 0 && is_border(chunks - step) &&
            task.owns(chunks - step - 1))
            store_state_transposed(border_state(g, task, task.first_chunk + chunks - step), state, 0,
                                   column(), g.dim_k, g.dim_v, g.dim_v);
        walk_chunk(step);
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
