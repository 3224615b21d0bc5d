// The gate warps of the forward. A team makes what the walkers need of a chunk while these are at the one
// before. Its last three warps also carry all that comes from and goes to global memory (carrier.cuh). Per
// step of the walk:
//   1. Wait for q, k and the log gates, and until the walkers are done with the step whose place in P this
//   one
//      takes.
//   2. Read the gates; the team agrees on the form.
//   3. Around the middle (middle.cuh), or operands and scores by levels (chunk.cuh). Under the scores, or
//   after
//      them, start the load of V of the next step.
//   4. Hand the chunk to the walkers.
//   5. Start the load of the log gates of a later step. Wait for the walkers' O of the step before, store it,
//      and start the loads of q and k of a later one into its place.
#pragma once

#include "channel_gate/forward/carrier.cuh"

namespace tfla_tk::channel_gate {

template <class C> __device__ inline ChunkPlaces places_of(ForwardMemory<C>& smem, int step) {
    const int slot = Use<C::kStages>(step).slot, scores = Use<C::kScoreSlots>(step).slot;
    return {shared_address(&smem.operands[slot].q), shared_address(&smem.operands[slot].k),
            shared_address(smem.work[scores]), shared_address(&smem.p[scores]),
            shared_address(smem.decay[scores])};
}

// What the walkers need of a step, by a team; hands it on. mild: whether the team's last chunk was, then
// whether this one is. meanwhile(): other work of some warps.
template <class C, class Meanwhile>
__device__ inline void make_step(const ForwardGlobals& g, ForwardMemory<C>& smem, int& step, int team,
                                 int warp, bool& mild, Meanwhile meanwhile) {
    using T = typename C::T;
    const Use<C::kStages> use(step);
    const Use<C::kScoreSlots> scores(step);
    wait(smem.gates_arrived[scores.slot], scores.phase);  // 1
    wait(smem.arrived[use.slot], use.phase);
    if (!C::kSequential) wait_done(smem, step - C::kScoreSlots);
    const int tokens = smem.task.tokens_of(smem.task.template chunk_of<C>(step));
    GateWarp<T, C::kDimK> x{places_of(smem, step), team, warp, {shared_address(&smem.lanes[fresh_laneid()])}};
    AroundMiddle<T, C::kDimK, C::kTwoParts> middle{x};
    mild = middle.is_mild(g.gates.dtype, tokens - x.block() * kBlock, !mild);  // 2
    if (warp == 0 && fresh_laneid() == 0) smem.mild[scores.slot] = mild;
    if (mild) {  // 3
        middle.scale_operands(g.scale, x.chunk.decay);
        middle.make_scores(meanwhile);
    } else {
        // NOTES: put away over the levels, to save a register
        auto kept = [&] { return shared_address(&smem.steps[team * C::kTeamWarps + warp]); };
        if (fresh_laneid() == 0) store_word(kept(), step);
        if (middle.block_is_mild)
            x.make_block_around_middle(g.gates.dtype, tokens);
        else
            x.make_levels_of_block(g.gates.dtype, tokens);
        x.publish();
        step = load_anew(kept());
        x.chunk.decay = shared_address(smem.decay[Use<C::kScoreSlots>(step).slot]);
        x.scale_operands(g.scale);
        x.make_scores(g.scale);
    }
    fence_async_proxy();
    const int slot = Use<C::kScoreSlots>(step).slot;
    arrive_warp(smem.operands_ready[slot]), arrive_warp(smem.work_free[slot]);  // 4
    if (!mild) meanwhile();
}

// gate_warp: of all teams.
template <class C>
__device__ inline void run_gates(const ForwardGlobals& g, ForwardMemory<C>& smem, int gate_warp) {
    const int team = C::kTeams == 1 ? 0 : gate_warp / C::kTeamWarps, warp = gate_warp % C::kTeamWarps;
    // NOTES: read anew where it is needed, to save registers
    auto steps = [&] { return smem.task.chunks; };
    const int duty = C::kTeamWarps - 1 - warp;  // beside its share of the work: 0 V and O, 1 q and k, 2 gates
    const Carrier<C> carrier{g, smem, team};
    bool mild = true;
    if (team == 0 && steps() > 0) {
#pragma unroll 1
        for (int step = 0; step < C::kStages - 1; step++) {
            if (duty == 1) carrier.load_operands(step);
            if (duty == 2) carrier.load_gates(step);
        }
        if (duty == 0) carrier.load_values(0);
    }
#pragma unroll 1
    for (int step = team; step < steps(); step += C::kTeams) {
        if (C::kSequential) wait_done(smem, step - 1);
        make_step(g, smem, step, team, warp, mild, [&] {
            if (duty == 0) carrier.load_values(step + 1);
        });
        if (duty == 0) carrier.store(step - 1);  // 5
        if (duty == 1) carrier.load_operands(step - 1 + C::kStages);
        if (duty == 2) carrier.load_gates(step + C::kScoreSlots);
        __syncwarp();
    }
    if (duty > 0) return;
    if (team == 0) carrier.store(steps() - 1);
    wait_stores_done();
}

}  // namespace tfla_tk::channel_gate
