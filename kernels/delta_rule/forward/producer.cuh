// Producer warps of the forward's walk: loads, factors of the gates, stores.
#pragma once

#include "delta_rule/forward/config.cuh"

namespace tfla_tk::delta_rule {

// One warp: keys, queries and what matrices the walk does not make.
template <class C> __device__ inline void load_tiles(const ForwardGlobals& g, ForwardMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
    int made = 0;  // chunks whose matrices are known to be there
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        ForwardStage<C>& stage = smem.stages[slot];
        semaphore& arrived = tiles_arrived<C>(smem, slot);
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, arrived, 0, task.key_head, chunk);
        load(stage.queries, g.q, arrived, 0, task.key_head, chunk);
        if (C::kMakerWarpgroups > 0 && chunk >= made) made = chunk + wait_made(g, task, chunk);
        if (!C::kMakesMatrices && fresh_laneid() == 0) {
            load_matrices<C>(g, task, stage, smem.arrived[slot], chunk);
            if constexpr (C::kMakerWarpgroups > 0) mark_loaded(g, task, chunk);
        }
    }
}

// One warp; a lane has two tokens.
template <class C> __device__ inline void scan_gates(const ForwardGlobals& g, ForwardMemory<C>& smem) {
    const Task& task = smem.task;
    GatesAhead ahead(smem.gate_ring, g.g, g.beta, task);
#pragma unroll 1
    for (int chunk = 0; chunk < ahead.kSteps; chunk++) ahead.load(chunk, chunk);
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [log_decay, x] = ahead.take(chunk);
        const TwoPairs b = cumulative_log2_decay(log_decay);
        ahead.load(chunk + ahead.kSteps, chunk + ahead.kSteps);
        const auto [slot, phase] = Use<C::kStages>(chunk);
        wait_free(smem.free[slot], phase);
        ForwardGates<C>& gates = smem.gates_of(slot);
        if constexpr (C::kMakesMatrices) smem.maker.gates[slot].write(fresh_laneid(), b, x);
        const Decays decays(b);  // NOTES: not earlier, to save registers
        const float2 read = decays.to_token, kept = decays.to_end;
        const int lane = fresh_laneid();
        if constexpr (C::kHasScorer) gates.log2_decay.write(lane, b);
        gates.minus_read.write(lane, {-read.x, -read.y});
        gates.out.write(lane, {g.scale * read.x, g.scale * read.y});
        gates.beta.write(lane, x);
        if constexpr (C::kIsWide) gates.written.write(lane, written_part(x, kept));
        gates.update.write(lane, {x.x * kept.x, x.y * kept.y});
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(tiles_arrived<C>(smem, slot));
    }
    wait_copies();
}

// One warp per walker: V into a stage, and out of it O, which the walker has put in its place; the writes
// where they are wanted.
template <class C>
__device__ inline void load_values_and_store_outputs(const ForwardGlobals& g, ForwardMemory<C>& smem,
                                                     int walker) {
    const Task& task = smem.task;
    const int column = task.column + walker * kWalkerColumns;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1 + walker]);
    auto store = [&](const ResultMaps& to, const void* tile, int chunk) {
        if (!smem.task.owns(chunk)) return;
        store_chunk(task, g.packed(), to, tile, chunk, [&](const TensorMap& map, uint32_t from, int row) {
            map.store_panel(from, column, row, task.head, task.batch);
        });
        wait_stores_read();
        __syncwarp();
    };
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks + C::kStages; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        auto& tile = smem.stages[slot].values[walker];
        if (const int stored = chunk - C::kStages; stored >= 0 && stored < task.chunks) {
            if (g.keep_writes) {
                wait(smem.writes_ready[walker], stored & 1);
                store(g.writes, &smem.writes[walker], stored);
                arrive_warp(smem.writes_free[walker]);
            }
            wait(smem.out_ready[walker][slot], phase ^ 1);
            store(g.o, &tile, stored);
        }
        if (chunk < task.chunks) load(tile, g.v, smem.arrived[slot], column, task.head, chunk);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::delta_rule
