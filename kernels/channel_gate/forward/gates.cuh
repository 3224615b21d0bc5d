// The gate warps of the forward. A team makes what the walkers need of a chunk while these are at the one
// before. Its last three warps also carry all that comes from and goes to global memory (carrier.cuh). Per
// turn:
//   1. Wait until the walkers are done with the step whose place in P this one takes, and for q, k and the
//      log gates.
//   2. Read the gates; the team agrees on the form.
//   3. Around the middle (middle.cuh), or operands and scores by levels (chunk.cuh). Under the scores, or
//      after them, start the load of V of the next step.
//   4. Hand the chunk to the walkers.
//   5. Start the load of the log gates of a later step. Wait for the walkers' O of the step before, store it,
//      and start the loads of q and k of a later one into its place.
// Where walkers have columns of their own, they load V and store O. Where two CTAs take turns, the loads of q
// and k of the next turn begin in step 3, under the scores or before them. In step 5 the team sends
// the chunk to the other CTA.
#pragma once

#include "channel_gate/forward/carrier.cuh"

namespace tfla_tk::channel_gate {

template <class C> __device__ inline ChunkPlaces places_of(ForwardMemory<C>& smem, int turn) {
    const int slot = Use<C::kStages>(turn).slot, scores = Use<C::kScoreSlots>(turn).slot;
    return {shared_address(&smem.operands[slot].q), shared_address(&smem.operands[slot].k),
            shared_address(smem.work[scores]), shared_address(&smem.p[scores]),
            shared_address(smem.factors[scores].decay)};
}

// What the walkers need of a turn's step, by a team; hands it on. mild: whether the team's last chunk was,
// then whether this one is. meanwhile(): other work of some warps.
template <class C, class Meanwhile>
__device__ inline void make_step(const ForwardGlobals& g, ForwardMemory<C>& smem, int& turn, int team,
                                 int warp, bool& mild, Meanwhile meanwhile) {
    const Use<C::kStages> use(turn);
    const Use<C::kScoreSlots> scores(turn);
    // 1. NOTES: first for the walkers. Barriers tell phases by parity, so a team that is ahead of the other
    // one might take an earlier phase for the one that it waits for.
    wait_done(smem, turn - C::kScoreSlots);
    wait(smem.gates_arrived[scores.slot], scores.phase);
    wait(smem.arrived[use.slot], use.phase);
    const int tokens = smem.task.tokens_of(smem.task.template chunk_of<C>(C::step_of(turn)));
    typename C::GateWarp x{places_of(smem, turn), team, warp, {shared_address(&smem.lanes[fresh_laneid()])}};
    typename C::AroundMiddle middle{x};
    mild = middle.is_mild(g.gates.dtype, tokens - x.block() * kBlock, !mild);  // 2
    if (warp == 0 && elected()) smem.factors[scores.slot].mild = mild;
    if (mild) {  // 3
        middle.scale_operands(g.scale, x.chunk.decay);
        middle.make_scores(meanwhile);
    } else {
        // NOTES: put away over the levels, to save a register
        auto kept = [&] { return shared_address(&smem.turns[team * C::kTeamWarps + warp]); };
        if (fresh_laneid() == 0) store_word(kept(), turn);
        if (middle.block_is_mild)
            x.make_block_around_middle(g.gates.dtype, tokens);
        else
            x.make_levels_of_block(g.gates.dtype, tokens);
        x.publish();
        turn = load_anew(kept());
        x.chunk.decay = shared_address(smem.factors[Use<C::kScoreSlots>(turn).slot].decay);
        x.scale_operands(g.scale);
        if constexpr (C::kShares) meanwhile();
        x.make_scores(g.scale);
        x.store_operands();
    }
    fence_async_proxy();
    const int slot = Use<C::kScoreSlots>(turn).slot;
    arrive_warp(smem.operands_ready[slot]), arrive_warp(smem.work_free[slot]);  // 4
    if (!C::kShares && !mild) meanwhile();
}

// gate_warp: of all teams.
template <class C>
__device__ inline void run_gates(const ForwardGlobals& g, ForwardMemory<C>& smem, int gate_warp) {
    const int team = C::kTeams == 1 ? 0 : gate_warp / C::kTeamWarps, warp = gate_warp % C::kTeamWarps;
    // NOTES: read anew where it is needed, to save registers
    auto steps = [&] { return smem.task.chunks; };
    // Beside its share of the work: 0 V and O, or what is sent, 1 q and k, 2 gates.
    const int duty = C::kTeamWarps - 1 - warp;
    const Carrier<C> carrier{g, smem, team};
    bool mild = true;
    if (team == 0 && steps() > 0) {
#pragma unroll 1
        for (int turn = 0; turn < C::kScoreSlots; turn++) {
            if (duty == 1 && turn < C::kStages - 1) carrier.load_operands(turn);
            if (duty == 2) carrier.load_gates(turn);
        }
        if (!C::kOwnColumns && duty == 0) carrier.load_values(0);
    }
#pragma unroll 1
    for (int turn = team; C::step_of(turn) < steps(); turn += C::kTeams) {
        make_step(g, smem, turn, team, warp, mild, [&] {
            if constexpr (C::kShares) {
                if (duty == 1) carrier.load_operands(turn - 1 + C::kStages);
            } else if constexpr (!C::kOwnColumns) {
                if (duty == 0) carrier.load_values(turn + 1);
            }
        });
        if constexpr (C::kShares) {  // 5
            if (duty == 0) carrier.send(turn);
        } else {
            if (!C::kOwnColumns && duty == 0) carrier.store(turn - 1);
            if (duty == 1) carrier.load_operands(turn - 1 + C::kStages);
        }
        if (duty == 2) carrier.load_gates(turn + C::kScoreSlots);
        __syncwarp();
    }
    if (C::kOwnColumns || duty > 0) return;
    if (team == 0) carrier.store(steps() - 1);
    wait_stores_done();
}

}  // namespace tfla_tk::channel_gate
