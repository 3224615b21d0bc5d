// Producer warps of the mirror walk: loads, factors of the gates, stores. Steps go from the last chunk to the
// first.
#pragma once

#include "delta_rule/backward/config.cuh"

namespace tfla_tk::delta_rule {

// One warp: all loads of a chunk but its gates, at last those to places that results are stored from.
template <class C> __device__ inline void load_tiles(const MirrorGlobals& g, MirrorMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        semaphore& tiles = tiles_arrived<C>(smem, slot);
        auto load_columns = [&](auto& of_walkers, const TensorMap& map) {
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++)
                load(of_walkers[walker], map, smem.arrived[slot], column_of_walker(task, walker), task.head,
                     chunk);
        };
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, tiles, 0, task.key_head, chunk);
        load(stage.queries, g.q, tiles, 0, task.key_head, chunk);
        if (fresh_laneid() == 0) load_matrices<C>(g, task, stage, smem.arrived[slot], chunk);
        if constexpr (!C::kStatesAlone) {
            load_columns(stage.writes, g.writes);
            wait_free(smem.out_read[slot], phase);
        }
        load_columns(stage.douts, g.dout);
    }
}

// One warp; a lane has two tokens.
template <class C, class Ring>
__device__ inline void scan_gates(const MirrorGlobals& g, MirrorMemory<C>& smem, Ring& ring) {
    const Task& task = smem.task;
    GatesAhead ahead(ring, g.g, g.beta, task);
    auto load = [&](int step) { ahead.load(step, task.chunks - 1 - step); };
    for (int step = 0; step < ahead.kSteps; step++) load(step);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const auto [log_decay, x] = ahead.take(step);
        const TwoPairs b = cumulative_log2_decay(log_decay);
        const Decays decays(b);
        const float2 read = decays.to_token;
        load(step + ahead.kSteps);
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        MirrorGates<C>& gates = smem.gates_of(slot);
        const int lane = fresh_laneid();
        if constexpr (C::kHasScorer) gates.log2_decay.write(lane, b);
        gates.update.write(lane, decays.to_end);
        gates.out.write(lane, {g.scale * read.x, g.scale * read.y});
        gates.beta.write(lane, x);
        gates.minus_read.write(lane, {-x.x * read.x, -x.y * read.y});
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(tiles_arrived<C>(smem, slot));
    }
    wait_copies();
}

// One warp per walker: dV out of a stage.
template <class C>
__device__ inline void store_gradients(const MirrorGlobals& g, MirrorMemory<C>& smem, int walker) {
    const Task& task = smem.task;
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        wait(smem.out_ready[walker][slot], phase);
        store_chunk(task, g.packed(), g.dv, &stage.douts[walker], chunk,
                    [&](const TensorMap& map, uint32_t from, int row) {
                        map.store_panel(from, column_of_walker(task, walker), row, task.head, task.batch);
                    });
        wait_stores_read();
        arrive_warp(smem.out_read[slot]);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::delta_rule
