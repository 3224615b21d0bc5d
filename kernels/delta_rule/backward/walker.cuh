// A walker of a mirror that leaves states alone (walk.cuh), backward in time. dU and dY share an accumulator;
// the state is dS^T. Per chunk:
//   1. Load dO^T. Round dS^T to A operands, then scale it by its decay. NOTES: before the first GEMM: ptxas
//      does not follow a GEMM's accumulators over the loop's edge while another GEMM is in flight (C7517).
//   2. Issue (P^T dO)^T = dO^T P and X^T = dS^T K^T.
//   3. Wait for dO^T P. Scale dO^T by s e^b and issue dS^T += dO^T Q.
//   4. Wait for X. dU^T = e^{b_L - b} X^T + (P^T dO)^T in the place of X^T; round beta dU^T.
//   5. Issue dY^T = dU^T + (beta dU^T) A.
//   6. Wait for dY and dS.
//   7. Round -e^b beta dY^T to A operands and issue dS^T += dY^T K.
//   8. Wait for dS; free the stage.
#pragma once

#include "delta_rule/backward/config.cuh"

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
    Fragment tokens[kTokenSteps];  // dO^T, as it is and scaled
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
    auto add_to_state = [&](auto fragment, const typename C::Tile& tile) {
        const auto columns = Operand128B::columns(&tile, C::Tile::panel_bytes);
        each<0, kTokenSteps>(
            [&](int j) { multiply_step<true>(state, fragment(j), columns.column_step(j), true, j == 0); });
    };
    auto token = [&](int j) -> Fragment& { return tokens[j]; };
    auto load_tokens = [&](const typename C::Columns& tile) {
        const uint32_t address = shared_address(&tile) + lane_offset;
        each<0, kTokenSteps>(
            [&](int j) { load_transposed(tokens[j], address + 16 * j * kPanelColumns * sizeof(T)); });
    };

    auto walk_chunk = [&](int step) {
        const int slot = Use<C::kStages>(step).slot;
        MirrorStage<C>& stage = smem.stages[slot];
        const MirrorGates<C>& gates = smem.gates[slot];
        load_tokens(stage.douts[walker]);  // 1
        pin_all(tokens);
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
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
        each<0, kTokenSteps>([&](int j) {
            each<0, 4>([&](int k) {
                T2& pair = tokens[j].tiles[0][0].data[k];
                const float2 x = to_float2(pair), e = out.of(j).of[k / 2];
                pair = from_float2<T2>({e.x * x.x, e.y * x.y});
            });
        });
        add_to_state(token, stage.queries);
        const LaneFactors update(gates.update, fresh_laneid());
        const LateFactors beta(gates.beta, fresh_laneid());  // NOTES: no registers to read both ahead
        wait_but.template operator()<kTokenSteps>();         // 4
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
        warpgroup::mma_async_wait<0>();  // 8
        pin(state), pin_rounded();
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
        walk_chunk(step);
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
