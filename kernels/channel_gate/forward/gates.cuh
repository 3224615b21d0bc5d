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

#include "channel_gate/forward/config.cuh"
#include "common/store_rows.cuh"

namespace tfla_tk::channel_gate {

// Until the walkers are done with a chunk.
template <class C> __device__ inline void wait_done(ForwardMemory<C>& smem, int chunk) {
    if (chunk < 0) return;
    const Use<C::kStages> use(chunk);
    wait(smem.done[use.slot], use.phase);
}

// Of one warp. NOTES: only a sequence's last chunk may end early, and loads an even number of tiles before V:
// so each of these functions begins with the same phase of tail_landed, and no loader has to be kept.
template <class C> struct Carrier {
    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    int team;

    __device__ inline TileLoader<Task> loader(int of) const {
        return {smem.task, g.packed(), smem.tail_landed[team][of]};
    }

    __device__ inline void load_gates(int chunk) const {
        const Task& task = smem.task;
        if (chunk >= task.chunks) return;
        const Use<C::kScoreSlots> use(chunk);
        wait_free(smem.work_free[use.slot], use.phase);
        if (fresh_laneid() == 0)
            g.gates.load<C::kDimK / kBlockChannels>(smem.work[use.slot], smem.gates_arrived[use.slot],
                                                    task.first_row + chunk * kChunk, task.head, task.batch);
    }

    // q and k, in the place of those of an earlier chunk, which the walkers are done with.
    __device__ inline void load_operands(int chunk) const {
        const Task& task = smem.task;
        if (chunk >= task.chunks) return;
        wait_done(smem, chunk - C::kStages);
        const int slot = Use<C::kStages>(chunk).slot;
        TileLoader<Task> load_tile = loader(0);
        load_tile(smem.operands[slot].q, g.q, smem.arrived[slot], 0, task.head, chunk);
        load_tile(smem.operands[slot].k, g.k, smem.arrived[slot], 0, task.head, chunk);
    }

    // V, where O of an earlier chunk has been, which this warp has stored.
    __device__ inline void load_values(int chunk) const {
        const Task& task = smem.task;
        if (chunk >= task.chunks) return;
        const int slot = Use<C::kStages>(chunk).slot;
        wait_stores_read();
        __syncwarp();
        TileLoader<Task> load_tile = loader(1);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            load_tile(smem.values[slot][i], g.v, smem.values_arrived[slot], task.column + i * kWalkerColumns,
                      task.head, chunk);
    }

    __device__ inline void store(int chunk) const {
        if (chunk < 0) return;
        const Task& task = smem.task;
        wait_done(smem, chunk);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            store_chunk(task, g.packed(), g.o, g.o_box, g.o_row, &smem.values[Use<C::kStages>(chunk).slot][i],
                        chunk, [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, task.column + i * kWalkerColumns, row, task.head,
                                            task.batch);
                        });
    }
};

template <class C> __device__ inline ChunkPlaces places_of(ForwardMemory<C>& smem, int chunk) {
    const int slot = Use<C::kStages>(chunk).slot, scores = Use<C::kScoreSlots>(chunk).slot;
    return {shared_address(&smem.operands[slot].q), shared_address(&smem.operands[slot].k),
            shared_address(smem.work[scores]), shared_address(&smem.p[scores]),
            shared_address(smem.decay[scores])};
}

// What the walkers need of a chunk, by a team; hands it on.
template <class C, class Meanwhile>
__device__ inline void make_chunk(const ForwardGlobals& g, ForwardMemory<C>& smem, int chunk, int team,
                                  int warp, Meanwhile meanwhile) {
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
    const bool mild = middle.is_mild(g.gates.dtype, tokens - x.block() * kBlock);
    if (warp == 0 && fresh_laneid() == 0) smem.mild[scores.slot] = mild;
    if (mild) {
        arrive_warp(smem.work_free[scores.slot]);
        middle.scale_operands(g.scale, x.chunk.decay);
        middle.make_scores(meanwhile);
    } else {
        x.make_levels_of_block(g.gates.dtype, tokens);
        x.publish();
        x.scale_operands(g.scale);
        x.make_scores(g.scale);
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
        make_chunk(g, smem, chunk, team, warp, [&] {
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
