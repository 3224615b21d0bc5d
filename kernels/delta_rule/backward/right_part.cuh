// The right part of dk (bindings/params_states.h), made by the mirror's walkers behind dV of a chunk. All
// that it needs is in shared memory by then. A walker, which owns 64 columns of V, makes it of 64 columns of
// K:
//   1. Meet: dS^T and dV of both walkers are there.
//   2. Issue half of the products dV writes^T, the scores of the erasures E. Load dS, of the walker's columns
//      of K, as A operands; if sums for dg are wanted and the chunk's end is an anchor, store it there. Issue
//      right^T = dS writes^T.
//   3. Gate and round the walker's half of E. Meet: both halves are there.
//   4. Wait for dS writes^T; scale it by rest e^{b_L - b}. Issue right^T += Q^T R + K^T E.
//   5. Wait for right; its sums per token, which the producer adds up. Then right in the place of the
//      queries.
// The scorer has made the scores of the reads, R. dS is updated by the walk itself.
#pragma once

#include "delta_rule/backward/config.cuh"
#include "delta_rule/backward/key_steps.cuh"

namespace tfla_tk::delta_rule {

// The rounded state of a walker, which both need as operands.
template <class C, class Fragment, int kCount>
__device__ inline void share_gradient(MirrorMemory<C>& smem, Fragment (&state)[kCount]) {
    using Tile = decltype(smem.gradient);
    const uint32_t tile = shared_address(&smem.gradient);
    const int first_row = (fresh_thread() - 128) / 32 * 16;
    each<0, kCount>([&](int k) {
        store_fragment<typename C::T, Tile::rows>(tile, first_row, k, state[k].tiles[0][0].data);
    });
}

// pin_own(): pins what the GEMMs read and wrote that the walker has issued for its own state; called once
// they are complete.
template <class C, class PinOwn>
__device__ inline void make_right_part(const MirrorGlobals& g, MirrorMemory<C>& smem, int slot, int chunk,
                                       PinOwn pin_own) {
    using T = typename C::T;
    using W = KeySteps<C>;
    constexpr int kHalf = kChunk / 2;
    MirrorStage<C>& stage = smem.stages[slot];
    const MirrorGates<C>& gates = smem.gates[slot];
    const RightTask& task = smem.task;
    // NOTES: recomputed, to save registers
    auto walker = [] { return fresh_thread() / 128 - 1; };
    auto warp = [] { return fresh_thread() / 32 % 4; };
    auto column = [] { return (fresh_thread() - 128) / 32 * 16; };
    auto part = [&] { return task.first_part + column() / 16; };
    const auto& writes = reinterpret_cast<const typename C::Values&>(stage.writes);
    const auto& dv = reinterpret_cast<const typename C::Values&>(stage.douts);
    auto columns_of = [&](auto& tile) -> auto& {
        return reinterpret_cast<typename C::Columns&>(tile.data[walker()]);
    };

    // NOTES: what is read of the task takes some 300 cycles beside GEMMs, so it is read ahead
    uint4* anchor = nullptr;
    if (C::kMakesSums && is_anchor(task, chunk + 1) && column() < g.dim_k)
        anchor = anchor_units<C>(task, anchor_part(g.right, task, chunk + 1, part()), fresh_laneid());
    pin(anchor);
    meet_walkers<C>();  // 1
    rt_fl<16, kHalf> erasures;
    typename W::Fragment state[W::kStateSteps];  // dS, rounded
    typename W::Tokens right;
    issue_scores<T, C::kDimV>(erasures, dv, writes, kHalf * walker());  // 2
    const uint32_t of_walker = shared_address(smem.gradient.data[walker()]) + transposed_lane_offset(warp());
    each<0, W::kStateSteps>(
        [&](int k) { load_transposed(state[k], of_walker + 16 * k * kPanelColumns * sizeof(T)); });
    if (anchor) store_anchor<C>(anchor, state);
    W::template wait_but<1>();
    pin_own();
    W::read_state(right, state, writes);
    ReadGates<kHalf> between(gates.log2_decay, -1.f, kHalf * walker(), warp());
    between.turn_to_writes(gates.rest);
    W::template wait_but<W::kStateSteps>();  // 3
    pin(erasures);
    between.template apply_to_writes<true>(erasures);
    store_panels<T, kChunk>(shared_address(&smem.erasures), 16 * warp(), erasures, kHalf / 16 * walker());
    typename W::Factors queries, keys;
    W::load(queries, columns_of(stage.queries)), W::load(keys, columns_of(stage.keys));
    meet_walkers<C>();
    warpgroup::mma_async_wait<0>();  // 4
    pin(right), pin_all(state);
    auto of_keys = [&](int j, int k) { return W::product(keys[j], right, j, k); };
    ThroughState<true> through;
    if constexpr (C::kMakesSums)
        W::sum_and_scale(through, right, [&](int j) -> const auto& { return keys[j]; }, gates.right, 1.f);
    else
        W::scale(right, gates.right);
    W::add_columns(right, queries, stage.reads, true);
    W::add_columns(right, keys, smem.erasures, false);
    RightSums& sums = stage.right_sums()[walker()];
    if constexpr (C::kMakesSums) {
        const auto of_warp = SumsThroughState::of(through);
        if (fresh_laneid() == 0) sums.through[warp()] = of_warp;
    }
    warpgroup::mma_async_wait<0>();  // 5
    pin(right), pin_all(queries), pin_all(keys);
    if constexpr (C::kMakesSums) sums.whole.write(warp(), token_sums(fresh_laneid(), of_keys));
    W::store(columns_of(stage.queries), right);
    fence_async_proxy();
}

}  // namespace tfla_tk::delta_rule
