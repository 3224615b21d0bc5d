// Producer warps of the mirror walk: loads, factors of the gates, stores. Steps go from the last chunk to the
// first.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/backward/config.cuh"

namespace tfla_tk::delta_rule {

// One warp: keys, queries and what matrices the walk does not make.
template <class C> __device__ inline void load_tiles(const MirrorGlobals& g, MirrorMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        semaphore& arrived = tiles_arrived<C>(smem, slot);
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, arrived, 0, task.key_head, chunk);
        load(stage.queries, g.q, arrived, 0, task.key_head, chunk);
        if (fresh_laneid() == 0) load_matrices<C>(g, task, stage, smem.arrived[slot], chunk);
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
template <class C> __device__ inline void scan_gates(const MirrorGlobals& g, MirrorMemory<C>& smem) {
    if constexpr (C::kHasGateRing) {
        scan_gates(g, smem, smem.gate_ring);
    } else {
        GateRegisters registers;
        scan_gates(g, smem, registers);
    }
}

// One warp per walker: dO and writes into a stage, and out of it dV, which the walker has put in the place of
// dO.
template <class C>
__device__ inline void load_columns_and_store_gradients(const MirrorGlobals& g, MirrorMemory<C>& smem,
                                                        int walker) {
    const Task& task = smem.task;
    const int column = task.column + walker * kWalkerColumns;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1 + walker]);
    auto store = [&](const TensorMap& chunks, const TensorMap& boxes, const TensorMap& rows, const void* tile,
                     int chunk) {
        store_chunk(task, g.packed(), chunks, boxes, rows, tile, chunk,
                    [&](const TensorMap& map, uint32_t from, int row) {
                        map.store_panel(from, column, row, task.head, task.batch);
                    });
    };
#pragma unroll 1
    for (int step = 0; step < task.chunks + C::kStages; step++) {
        const auto [slot, phase] = Use<C::kStages>(step);
        MirrorStage<C>& stage = smem.stages[slot];
        if (const int stored = step - C::kStages; stored >= 0 && stored < task.chunks) {
            const int chunk = task.chunks - 1 - stored;
            wait(smem.out_ready[walker][slot], phase ^ 1);
            store(g.dv, g.dv_box, g.dv_row, &stage.douts[walker], chunk);
            wait_stores_read();
            __syncwarp();
        }
        if (step >= task.chunks) continue;
        const int chunk = task.chunks - 1 - step;
        load(stage.douts[walker], g.dout, smem.arrived[slot], column, task.head, chunk);
        load(stage.writes[walker], g.writes, smem.arrived[slot], column, task.head, chunk);
    }
    wait_stores_done();
}

// One warp per walker of a walk that leaves states alone: dO into a stage.
template <class C>
__device__ inline void load_output_gradients(const MirrorGlobals& g, MirrorMemory<C>& smem, int walker) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1 + walker]);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const auto [slot, phase] = Use<C::kStages>(step);
        wait_free(smem.free[slot], phase);
        load(smem.stages[slot].douts[walker], g.dout, smem.arrived[slot],
             task.column + walker * kWalkerColumns, task.head, task.chunks - 1 - step);
    }
}

}  // namespace tfla_tk::delta_rule
