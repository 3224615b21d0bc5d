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
    auto& rounded = reinterpret_cast<Fragment(&)[kTokenSteps]>(read);

    const WalkTask& task = smem.task;
    const int chunks = task.chunks;
    // NOTES: recomputed, to save registers
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    const uint32_t lane_offset = transposed_lane_offset(warpgroup::warpid());

    auto walk_chunk = [&](int step) {
        const int slot = Use<C::kStages>(step).slot;
        MirrorStage<C>& stage = smem.stages[slot];
        const MirrorGates<C>& gates = smem.gates[slot];
        load_tokens(tokens, shared_address(&stage.douts[walker]) + lane_offset);  // 1
        pin_all(tokens);
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });
        warp::mul(state, state, gates.decay);
        pin(state);
        forget(through);  // 2
        const auto p = Operand128B::columns(&stage.p, C::Square::panel_bytes);
        each<0, kTokenSteps>(
            [&](int j) { multiply_step<true>(through, tokens[j], p.column_step(j), j > 0, j == 0); });
        forget(x);
        const auto keys = Operand128B::rows(&stage.keys);
        each<0, kStateSteps>([&](int k) {
            multiply_step<false>(x, read[k], keys.row_step(C::Tile::panel_bytes, k), k > 0, k == 0);
        });
        const LaneFactors out(gates.out, fresh_laneid());
        wait_but<kStateSteps>();  // 3
        pin(through), pin_all(tokens);
        scale_fragments(tokens, out);
        add_columns(state, tokens, stage.queries);
        const LaneFactors update(gates.update, fresh_laneid());
        const LateFactors beta(gates.beta, fresh_laneid());  // NOTES: no registers to read both ahead
        wait_but<kTokenSteps>();                             // 4
        pin(x), pin_all(read);
        each<0, kTokenSteps>([&](int j) {
            const auto betas = beta.of(j);
            each<0, 4>([&](int k) {
                float2& du = x.tiles[0][j].data[k];
                fma_in_place(du, update.of(j).of[k / 2], through.tiles[0][j].data[k]);
                const float2 by = betas.of[k / 2];
                rounded[j].tiles[0][0].data[k] = from_float2<T2>({by.x * du.x, by.y * du.y});
            });
        });
        add_columns(x, rounded, stage.a);  // 5
        const LaneFactors minus_read(gates.minus_read, fresh_laneid());
        warpgroup::mma_async_wait<0>();  // 6
        pin(x), pin(state), pin_all(tokens), pin_all(rounded);
        round_scaled(rounded, x, minus_read);  // 7
        add_columns(state, rounded, stage.keys);
        warpgroup::mma_async_wait<0>();  // 8
        pin(state), pin_all(rounded);
        arrive_warp(smem.free[slot]);
    };

    begin_state(state, task.entering, [&](auto& tile) {
        load_state_transposed(tile, task.entering, 0, column(), g.dim_k, g.dim_v, g.dim_v);
    });
    for (int step = 0; step < chunks; step++) {
        const Use<C::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase);
        walk_chunk(step);
    }
    if (task.leaving) store_state_transposed(task.leaving, state, 0, column(), g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
