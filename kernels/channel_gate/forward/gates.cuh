// The gate warps of the forward. A team makes what the walkers need of a chunk (chunk.cuh) while these are at
// the one before. The last warp of each team also carries all that comes from and goes to global memory. Per
// chunk:
//   1. Wait for q, k and the log gates. The carrier starts the load of V of the next chunk.
//   2. Levels within the blocks.
//   3. Wait until the walkers are done with the chunk whose place in P this one takes.
//   4. Operands, then scores between blocks.
//   5. Hand the chunk to the walkers.
//   6. The carrier waits for the walkers' O of the chunk before, stores it, and starts to load q, k and the
//   log
//      gates of a later chunk into that place.
#pragma once

#include "channel_gate/forward/carrier.cuh"

namespace tfla_tk::channel_gate {

template <class C> __device__ inline ChunkPlaces places_of(ForwardMemory<C>& smem, int chunk) {
    const int slot = Use<C::kStages>(chunk).slot, scores = Use<C::kScoreSlots>(chunk).slot;
    return {shared_address(&smem.operands[slot].q), shared_address(&smem.operands[slot].k),
            shared_address(smem.work[scores]), shared_address(&smem.p[scores]),
            shared_address(smem.decay[scores])};
}

// What the walkers need of a chunk, by a team; hands it on. mild: whether the team's last chunk was, then
// whether this one is. meanwhile(): other work of some warps.
template <class C, class Meanwhile>
__device__ inline void make_chunk(const ForwardGlobals& g, ForwardMemory<C>& smem, int chunk, int team,
                                  int warp, bool& mild, Meanwhile meanwhile) {
    using T = typename C::T;
    const Use<C::kStages> use(chunk);
    const Use<C::kScoreSlots> scores(chunk);
    wait(smem.gates_arrived[scores.slot], scores.phase);
    wait(smem.arrived[use.slot], use.phase);
    if (!C::kSequential) wait_done(smem, chunk - C::kScoreSlots);
    const int tokens = smem.task.tokens_of(chunk);
    GateWarp<T, C::kDimK> x{
        places_of(smem, chunk), team, warp, {shared_address(&smem.lanes[fresh_laneid()])}};
    AroundMiddle<T, C::kDimK> middle{x};
    mild = middle.is_mild(g.gates.dtype, tokens - x.block() * kBlock, !mild);
    if (warp == 0 && fresh_laneid() == 0) smem.mild[scores.slot] = mild;
    if (mild) {
        arrive_warp(smem.work_free[scores.slot]);
        middle.scale_operands(g.scale, x.chunk.decay);
        middle.make_scores(meanwhile);
    } else {
        if (middle.block_is_mild)
            x.make_block_around_middle(g.gates.dtype, tokens);
        else
            x.make_levels_of_block(g.gates.dtype, tokens);
        x.publish();
        x.scale_operands(g.scale);
        x.make_scores(g.scale);
        fence_async_proxy();
        arrive_warp(smem.work_free[scores.slot]);
        meanwhile();
    }
    fence_async_proxy();
    arrive_warp(smem.operands_ready[scores.slot]);
}

// gate_warp: of all teams.
template <class C>
__device__ inline void run_gates(const ForwardGlobals& g, ForwardMemory<C>& smem, int gate_warp) {
    const int team = C::kTeams == 1 ? 0 : gate_warp / C::kTeamWarps, warp = gate_warp % C::kTeamWarps;
    // NOTES: read anew where it is needed, to save registers
    auto chunks = [&] { return smem.task.chunks; };
    const int duty =
        C::kTeamWarps - 1 - warp;  // of this warp, beside its share: 0 values, 1 operands, 2 gates
    const Carrier<C> carrier{g, smem, team};
    bool mild = true;
    if (team == 0 && chunks() > 0) {
#pragma unroll 1
        for (int chunk = 0; chunk < C::kStages - 1; chunk++) {
            if (duty == 1) carrier.load_operands(chunk);
            if (duty == 2) carrier.load_gates(chunk);
        }
        if (duty == 0) carrier.load_values(0);
    }
#pragma unroll 1
    for (int chunk = team; chunk < chunks(); chunk += C::kTeams) {
        if (C::kSequential) wait_done(smem, chunk - 1);
        make_chunk(g, smem, chunk, team, warp, mild, [&] {
            if (duty == 0) carrier.load_values(chunk + 1);
            if (duty == 2) carrier.load_gates(chunk + C::kScoreSlots);
        });
        if (duty == 0) carrier.store(chunk - 1);
        if (duty == 1) carrier.load_operands(chunk - 1 + C::kStages);
        __syncwarp();
    }
    if (duty > 0) return;
    if (team == 0) carrier.store(chunks() - 1);
    wait_stores_done();
}

}  // namespace tfla_tk::channel_gate
