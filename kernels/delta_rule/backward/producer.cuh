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
        semaphore& columns = C::kMakesRight ? smem.for_scorer[slot] : smem.arrived[slot];
        auto load_columns = [&](auto& of_walkers, const TensorMap& map) {
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++)
                load(of_walkers[walker], map, columns, column_of_walker(task, walker), task.head, chunk);
        };
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, tiles, 0, task.key_head, chunk);
        if constexpr (!C::kMakesRight) load(stage.queries, g.q, tiles, 0, task.key_head, chunk);
        if (fresh_laneid() == 0) load_matrices<C>(g, task, stage, smem.arrived[slot], chunk);
        if constexpr (!C::kStatesAlone) {
            load_columns(stage.writes, g.writes);
            wait_free(smem.out_read[slot], phase);
        }
        if constexpr (C::kMakesRight) load(stage.queries, g.q, tiles, 0, task.key_head, chunk);
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
        if constexpr (C::kMakesRight) {
            gates.right.write(lane, update_part(x, decays.to_end));
            write_pair(gates.rest, 2 * lane, rest_part(x, decays.to_end));
        }
        arrive_warp(tiles_arrived<C>(smem, slot));
    }
    wait_copies();
}
template <class C> __device__ inline void scan_gates(const MirrorGlobals& g, MirrorMemory<C>& smem) {
    if constexpr (C::kHasGateRing) {
        scan_gates(g, smem, smem.gate_ring);
    } else {
        GateRegisters registers;
        scan_gates(g, smem, registers);
    }
}

// The sums of a walker's warps for dbeta, and those of its right part of dk, added up.
template <class C>
__device__ inline void store_walker_sums(const MirrorGlobals& g, MirrorMemory<C>& smem, MirrorStage<C>& stage,
                                         int walker, int chunk) {
    const auto& task = smem.task;
    const int lane = fresh_laneid(), tokens = task.tokens - chunk * kChunk;
    const int column = column_of_walker(task, walker);
    if (const int warps = warps_with_columns(column, g.dim_v); warps > 0)
        stage.strengths[walker].total(lane, warps).store(strengths_of<C>(g, task, chunk, column), tokens);
    if constexpr (C::kMakesSums) {
        const int warps = warps_with_columns(walker * kWalkerColumns, g.dim_k);
        const RightSums& sums = stage.right_sums()[walker];
        store_sums(g.right, task, chunk, task.slice * C::kWalkers + walker, sums.total_through(warps),
                   sums.whole.total(lane, warps));
    }
}

// One warp per walker: the results and the sums out of a stage.
template <class C>
__device__ inline void store_gradients(const MirrorGlobals& g, MirrorMemory<C>& smem, int walker) {
    const Task& task = smem.task;
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        wait(smem.out_ready[walker][slot], phase);
        if (smem.task.owns(chunk)) {
            store_chunk(task, g.packed(), g.dv, &stage.douts[walker], chunk,
                        [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, column_of_walker(task, walker), row, task.head, task.batch);
                        });
            if constexpr (C::kMakesRight) {
                const RightGlobals& right = g.right;
                const int head = task.head * right.slices + smem.task.slice;
                store_chunk(task, g.packed(), right.dk, stage.queries.data[walker], chunk,
                            [&](const TensorMap& map, uint32_t from, int row) {
                                map.store_panel(from, walker * kWalkerColumns, row, head, task.batch);
                            });
            }
            if constexpr (C::kAddsUpSums) store_walker_sums(g, smem, stage, walker, chunk);
        }
        wait_stores_read();
        arrive_warp(smem.out_read[slot]);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::delta_rule
