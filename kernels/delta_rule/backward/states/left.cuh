// A walker of the left walk (walker.cuh), forward in time: dq and the left part of dk. Per chunk:
//   1. Round S to A operands; at an anchor leave it. Then scale S by its decay.
//   2. Issue the products of the scores and S dO^T; under the latter make the scores.
//   3. Issue S dV^T. Wait for the other walker's scores and for S dO^T; scale it by s e^b.
//   4. Issue dq^T += K^T R^T. Wait for S dV^T; scale it by -e^b and issue left^T += K^T E^T.
//   5. Round rest e^{b_L - b} K^T to A operands and issue S += these times the writes.
//   6. Wait for dq and left; their sums per token. In later turns add those of the turn before. Then dq and
//      left in the places of q and k.
//   7. Wait for S; hand the stage over.
// NOTES: where tokens hardly decay the writes are what the forward has added (gates.cuh), and step 5 rounds
// nothing, so S is the forward's, where each token corrects the errors of those before it. Else the decay is
// on the keys, not on the writes: the right walk has the keys in registers and can sum with the same rounded
// numbers (sums.cuh).
#pragma once

#include "delta_rule/backward/states/turns.cuh"

namespace tfla_tk::delta_rule {

template <class C> __device__ inline void walk_left(const StatesGlobals& g, StatesMemory<C>& smem) {
    using W = StatesWalker<C>;
    constexpr int kStateSteps = W::kStateSteps, kTokenSteps = W::kTokenSteps;
    typename W::State state;  // S
    typename W::Tokens scores, dq, left;
    typename W::Fragment read[std::max(kStateSteps, kTokenSteps)];  // S, rounded; then the scaled keys
    auto& scaled = reinterpret_cast<typename W::Factors&>(read);
    typename W::Factors keys;

    const StatesTask& task = smem.task;
    // NOTES: recomputed, to save registers
    auto walker = [&] { return fresh_thread() / 128 - 1; };
    auto column = [&] { return task.column + (fresh_thread() - 128) / 32 * 16; };
    auto part = [&] { return task.first_part + column() / 16; };
    auto chunks = [&] { return static_cast<int>(load_anew(shared_address(&task.chunks))); };

    auto walk_chunk = [&](int chunk) {
        const int slot = Use<StatesMemory<C>::kStages>(chunk).slot;
        StatesStage<C>& stage = smem.stages[slot];
        const StatesGates& gates = smem.gates[slot];
        ChunkScores<C>& tiles = smem.scores;
        auto& columns = stage.columns[walker()];
        each<0, kStateSteps>([&](int k) { convert_fragment(read[k], state, k), pin(read[k]); });  // 1
        if (is_anchor(task, chunk) && column() < g.dim_k)
            store_anchor<C>(anchor_units<C>(task, anchor_part(g, task, chunk, part()), fresh_laneid()), read);
        warp::mul(state, state, gates.decay);
        pin(state);
        W::issue_reads_or_erasures(scores, stage, walker() == 0);  // 2
        W::read_state(dq, read, stage.dout);
        wait_but<kStateSteps>();
        wait_scores_read(smem, chunk);
        W::round_reads_or_erasures(tiles, scores, gates, g, walker() == 0);
        W::read_state(left, read, stage.dv);  // 3
        meet_walkers<C>();
        W::load(keys, columns.keys);
        wait_but<kStateSteps>();
        pin(dq);
        // NOTES: loaded where they are used, to save registers
        typename W::Fragment of_queries;
        auto query = [&](int j) -> const auto& {
            W::load(of_queries, columns.queries, j);
            return of_queries;
        };
        auto key = [&](int j) -> const auto& { return keys[j]; };
        const bool sums = task.whole != nullptr;
        ThroughState<false> through;
        if (sums)  // NOTES: without squares, which saves a register
            W::template sum_and_scale<false>(through, dq, query, gates.read, g.scale);
        else
            W::scale(dq, gates.read, g.scale);
        add_rows(dq, keys, tiles.reads);  // 4
        wait_but<kTokenSteps>();
        pin(left);
        pin_all(read);
        if (sums)
            W::sum_and_scale(through, left, key, gates.read, -1.f);
        else
            W::scale(left, gates.read, -1.f);
        add_rows(left, keys, tiles.erasures);
        W::scale(scaled, keys, gates.update, 1.f);  // 5
        add_columns(state, scaled, stage.writes);
        wait_but<kTokenSteps>();  // 6
        pin(dq), pin(left);
        if (sums && column() < g.dim_k)
            store_sums(g, task, chunk, part(), SumsThroughState::of(through),
                       token_sums(fresh_laneid(), [&](int j, int k) {
                           if (k == 0) query(j);
                           const float2 x = W::product(of_queries, dq, j, k);
                           const float2 y = W::product(keys[j], left, j, k);
                           return float2{x.x + y.x, x.y + y.y};
                       }));
        const Turns<C> turns{g, smem, walker()};
        if (task.turn > 0) {
            wait(smem.earlier_arrived[walker()][slot], Use<StatesMemory<C>::kStages>(chunk).phase);
            typename W::Factors unpacked;
            turns.add(dq, unpacked, smem.earlier.dq[walker()], 0);
            turns.add(left, unpacked, smem.earlier.left[walker()], 1);
        }
        turns.store(columns.queries, dq, chunk, 0);
        turns.store(columns.keys, left, chunk, 1);
        fence_async_proxy();
        arrive_warp(smem.out_ready[walker()][slot]);
        warpgroup::mma_async_wait<0>();  // 7
        pin(state), pin_all(read), pin_all(keys);
        arrive_warp(smem.free[slot]);
    };

    begin_state(state, task.entering, [&](auto& tile) {
        load_state(tile, task.entering, column(), task.value, g.dim_k, g.dim_v, g.dim_v);
    });
    for (int chunk = 0; chunk < chunks(); chunk++) {
        const Use<StatesMemory<C>::kStages> use(chunk);
        wait(smem.arrived[use.slot], use.phase);
        walk_chunk(chunk);
    }
    if (task.leaving) store_state(task.leaving, state, column(), task.value, g.dim_k, g.dim_v, g.dim_v);
}

}  // namespace tfla_tk::delta_rule
