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

    __device__ inline TileLoader<Task> loader() const {
        return {smem.task, g.packed(), smem.tail_landed[team]};
    }

    // q, k and log gates. The walkers are done with the chunk whose place this one takes.
    __device__ inline void load(int chunk) const {
        const Task& task = smem.task;
        if (chunk >= task.chunks) return;
        const int slot = Use<C::kStages>(chunk).slot, of_task = task.template chunk_of<C>(chunk);
        const Use<C::kScoreSlots> use(chunk);
        semaphore& arrived = smem.arrived[slot];
        wait_free(smem.work_free[use.slot], use.phase);
        if (fresh_laneid() == 0)
            g.gates.load<C::kDimK / kBlockChannels>(smem.work[use.slot], arrived,
                                                    task.first_row + of_task * kChunk, task.head, task.batch);
        TileLoader<Task> load_tile = loader();
        load_tile(smem.operands[slot].q, g.q, arrived, 0, task.head, of_task);
        load_tile(smem.operands[slot].k, g.k, arrived, 0, task.head, of_task);
    }

    // V, where O of an earlier chunk has been, which this warp has stored.
    __device__ inline void load_values(int chunk) const {
        const Task& task = smem.task;
        if (chunk >= task.chunks) return;
        const int slot = Use<C::kStages>(chunk).slot;
        wait_stores_read();
        __syncwarp();
        TileLoader<Task> load_tile = loader();
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            load_tile(smem.values[slot][i], g.v, smem.values_arrived[slot], task.column + i * kWalkerColumns,
                      task.head, task.template chunk_of<C>(chunk));
    }

    __device__ inline void store(int chunk) const {
        if (chunk < 0) return;
        const Task& task = smem.task;
        wait_done(smem, chunk);
#pragma unroll 1
        for (int i = 0; i < C::kWalkers; i++)
            store_chunk(task, g.packed(), g.o, g.o_box, g.o_row, &smem.values[Use<C::kStages>(chunk).slot][i],
                        task.template chunk_of<C>(chunk), [&](const TensorMap& map, uint32_t from, int row) {
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

// gate_warp: of all teams.
template <class C>
__device__ inline void run_gates(const ForwardGlobals& g, ForwardMemory<C>& smem, int gate_warp) {
    const int team = C::kTeams == 1 ? 0 : gate_warp / C::kTeamWarps, warp = gate_warp % C::kTeamWarps;
    // NOTES: read anew where it is needed, to save registers
    auto chunks = [&] { return smem.task.chunks; };
    const bool carries = warp == C::kTeamWarps - 1;
    const Carrier<C> carrier{g, smem, team};
    if (carries && team == 0 && chunks() > 0) {
#pragma unroll 1
        for (int chunk = 0; chunk < C::kStages - 1; chunk++) carrier.load(chunk);
        carrier.load_values(0);
    }
#pragma unroll 1
    for (int chunk = team; chunk < chunks(); chunk += C::kTeams) {
        const Use<C::kStages> use(chunk);
        const int scores = Use<C::kScoreSlots>(chunk).slot;
        if (C::kSequential) wait_done(smem, chunk - 1);
        wait(smem.arrived[use.slot], use.phase);  // 1
        if (carries) carrier.load_values(chunk + 1);
        GateWarp<typename C::T, C::kDimK> x{
            places_of(smem, chunk), team, warp, {shared_address(&smem.lanes[fresh_laneid()])}};
        x.make_levels_of_block(g.gates.dtype,
                               smem.task.tokens_of(smem.task.template chunk_of<C>(chunk)));  // 2
        if (!C::kSequential) wait_done(smem, chunk - C::kScoreSlots);                        // 3
        x.publish();                                                                         // 4
        x.scale_operands(g.scale);
        x.make_scores(g.scale);
        fence_async_proxy();
        arrive_warp(smem.work_free[scores]), arrive_warp(smem.operands_ready[scores]);  // 5
        if (carries) carrier.store(chunk - 1), carrier.load(chunk - 1 + C::kStages);    // 6
        __syncwarp();
    }
    if (carries && team == 0) carrier.store(chunks() - 1);
    if (carries) wait_stores_done();
}

}  // namespace tfla_tk::channel_gate
