// A walker of the right walk (walker.cuh), backward in time: dk, its left part given. Per chunk:
//   1. Round dS to A operands. Where the chunk's end is an anchor, compute the flow of gradient there. Then
//      scale dS by its decay.
//   2. Issue the products of the scores and right^T = dS writes^T; under the latter make the scores.
//   3. Wait for the other walker's scores and for dS writes^T; scale it by rest e^{b_L - b}.
//   4. Issue right^T += Q^T R + K^T E.
//   5. Round s e^b Q^T and -e^b K^T to A operands and issue dS += Q^T dO + K^T dV.
//   6. Wait for right; its sums per token. Add the left part of dk, in later turns dk of the turn before, and
//      put the sum in its place.
//   7. Hand the results over. Wait for dS; hand the stage over.
#pragma once

#include "delta_rule/backward/states/turns.cuh"
#include "delta_rule/backward/states/walker.cuh"

namespace tfla_tk::delta_rule {

template <class C> __device__ inline void walk_right(const StatesGlobals& g, StatesMemory<C>& smem) {
    using W = StatesWalker<C>;
    constexpr int kStateSteps = W::kStateSteps, kTokenSteps = W::kTokenSteps;
    typename W::State state;  // dS
    typename W::Tokens scores, right;
    typename W::Fragment
        read[std::max(kStateSteps, 2 * kTokenSteps)];  // dS, rounded; then the scaled factors
    auto &scaled_q = reinterpret_cast<typename W::Factors&>(read[0]),
         &scaled_k = reinterpret_cast<typename W::Factors&>(read[kTokenSteps]);
    typename W::Factors queries, keys;

    const StatesTask& task = smem.task;
    // NOTES: recomputed, to save registers
    auto walker = [&] { return fresh_thread() / 128 - 1; };
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    auto part = [&] { return task.first_part + column() / 16; };

    auto walk_chunk = [&](int step) {
        const int chunk = chunk_of_step<C>(task, step), slot = Use<StatesMemory<C>::kStages>(step).slot;
        StatesStage<C>& stage = smem.stages[slot];
        const StatesGates& gates = smem.gates[slot];
        ChunkScores<C>& tiles = smem.scores;
        auto& columns = stage.columns[walker()];
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });  // 1
        if (is_anchor(task, chunk + 1) && column() < g.dim_k) {
            const int anchor = anchor_part(g, task, chunk + 1, part()), lane = fresh_laneid();
            const float2 flows = anchor_flows<C>(anchor_units<C>(task, anchor, lane), state, read);
            if (lane == 0) task.flows[anchor] = flows.x, task.flows[anchor + g.all_flows] = flows.y;
        }
        warp::mul(state, state, gates.decay);
        pin(state);
        W::issue_reads_or_erasures(scores, stage, walker() == 0);  // 2
        W::read_state(right, read, stage.writes);
        wait_but<kStateSteps>();
        wait_scores_read(smem, step);
        W::round_reads_or_erasures(tiles, scores, gates, g, walker() == 0);
        meet_walkers<C>();  // 3
        W::load(queries, columns.queries), W::load(keys, columns.keys);
        warpgroup::mma_async_wait<0>();
        pin(right), pin_all(read);
        auto of_keys = [&](int j, int k) { return W::product(keys[j], right, j, k); };
        ThroughState<true> through;
        const bool sums = task.whole != nullptr;
        if (sums)
            W::sum_and_scale(
                through, right, [&](int j) -> const auto& { return keys[j]; }, gates.update, 1.f);
        else
            W::scale(right, gates.update);
        add_columns(right, queries, tiles.reads);  // 4
        add_columns(right, keys, tiles.erasures, false);
        W::scale(scaled_q, queries, gates.read, g.scale);  // 5
        add_columns(state, scaled_q, stage.dout);
        W::scale(scaled_k, keys, gates.read, -1.f);
        add_columns(state, scaled_k, stage.dv, false);
        wait_but<2 * kTokenSteps>();  // 6
        pin(right), pin_all(queries), pin_all(keys);
        if (sums && column() < g.dim_k)
            store_sums(g, task, chunk, part(), SumsThroughState::of(through),
                       token_sums(fresh_laneid(), of_keys));
        wait(smem.earlier_arrived[walker()][slot], Use<StatesMemory<C>::kStages>(step).phase);
        const Turns<C> turns{g, smem, walker()};
        if (task.turn > 0)
            turns.add(right, queries, columns.earlier, 0);
        else
            W::add(right, queries, columns.earlier);
        turns.store(columns.earlier, right, chunk, 0);
        fence_async_proxy();                          // 7
        arrive_warp(smem.out_ready[walker()][slot]);  // q and k of a later chunk may take their places
        if (chunk > 0 && is_anchor(task, chunk) && column() < g.dim_k)  // of the next step
            prefetch_anchor<C>(task, anchor_part(g, task, chunk, part()), fresh_laneid());
        warpgroup::mma_async_wait<0>();
        pin(state);
        each<0, 2 * kTokenSteps>([&](int j) { pin(read[j]); });
        arrive_warp(smem.free[slot]);
    };

    begin_state(state, task.entering, [&](auto& tile) {
        load_state(tile, task.entering, column(), task.value, g.dim_k, g.dim_v, g.dim_v);
    });
    auto chunks = [&] { return static_cast<int>(load_anew(shared_address(&task.chunks))); };
    for (int step = 0; step < chunks(); step++) {
        const Use<StatesMemory<C>::kStages> use(step);
        wait(smem.arrived[use.slot], use.phase);
        walk_chunk(step);
    }
    if (task.leaving) store_state(task.leaving, state, column(), task.value, g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
