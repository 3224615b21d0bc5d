// Producer warps of the walks for the gradients of q and k: loads, factors of the gates, stores.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/backward/states/config.cuh"

namespace tfla_tk::delta_rule {

// The chunk of a walk's step.
template <class C> __device__ inline int chunk_of_step(const Task& task, int step) {
    return C::kIsLeft ? step : task.chunks - 1 - step;
}

// One warp: writes, dO and dV.
template <class C> __device__ inline void load_values(const StatesGlobals& g, StatesMemory<C>& smem) {
    const StatesTask& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = chunk_of_step<C>(task, step);
        const auto [slot, phase] = Use<StatesMemory<C>::kStages>(step);
        StatesStage<C>& stage = smem.stages[slot];
        semaphore& arrived = smem.arrived[slot];
        wait_free(smem.free[slot], phase);
        load(stage.dout, g.dout, arrived, task.value, task.head, chunk);
        load(stage.writes, g.writes, arrived, task.value, task.head, chunk);
        load(stage.dv, g.dv, arrived, task.value, task.head, chunk);
    }
}

// One warp; a lane has two tokens.
template <class C, class Ring>
__device__ inline void scan_gates(const StatesGlobals& g, StatesMemory<C>& smem, Ring& ring) {
    const Task& task = smem.task;
    GatesAhead ahead(ring, g.g, g.beta, task);
    auto load = [&](int step) { ahead.load(step, chunk_of_step<C>(task, step)); };
    for (int step = 0; step < ahead.kSteps; step++) load(step);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const auto [log_decay, beta] = ahead.take(step);
        const TwoPairs b = cumulative_log2_decay(log_decay);
        const Decays decays(b);
        const float2 rest = rest_part(beta), kept = decays.to_end;
        load(step + ahead.kSteps);
        const auto [slot, phase] = Use<StatesMemory<C>::kStages>(step);
        wait_free(smem.free[slot], phase);
        StatesGates& gates = smem.gates[slot];
        const int lane = fresh_laneid();
        gates.read.write(lane, decays.to_token);
        gates.update.write(lane, {rest.x * kept.x, rest.y * kept.y});
        write_pair(gates.rest, 2 * lane, rest);
        gates.log2_decay.write(lane, b);
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(smem.arrived[slot]);
    }
    wait_copies();
}
template <class C> __device__ inline void scan_gates(const StatesGlobals& g, StatesMemory<C>& smem) {
    if constexpr (StatesMemory<C>::kHasGateRing) {
        scan_gates(g, smem, smem.gate_ring);
    } else {
        GateRegisters registers;
        scan_gates(g, smem, registers);
    }
}

// CTAs that share results write those of a chunk in turn, the slices of V of one head and then those of the
// next. So the order of the sums is always the same. Each turn adds what the one before has stored to its own
// results in fp32, so that only what it stores is rounded. `written` counts the chunks of a CTA that are in
// device memory.
__device__ inline void wait_written(const int* written, int chunks) {
    while (peek_from_device(written) < chunks) __nanosleep(32);
    acquire_from_device(written);
    fence_async_global();
}
__device__ inline void publish_written(int* written, int chunks) {
    wait_stores_done();  // each lane waits for its own stores
    fence_async_global();
    __syncwarp();
    if (fresh_laneid() == 0) release_to_device(written, chunks);
}

// One warp per walker: q, k and, of the right walk, what there is of dk into a stage, and out of it the
// results, which the walker has put in their places.
template <class C>
__device__ inline void load_columns_and_store_results(const StatesGlobals& g, StatesMemory<C>& smem,
                                                      int walker) {
    constexpr int kStages = StatesMemory<C>::kStages;
    const StatesTask& task = smem.task;
    const int column = task.column + walker * kWalkerColumns;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1 + walker]);
    auto load_earlier = [&](auto& tile, const TensorMap& from, int step) {
        load(tile, from, smem.earlier_arrived[walker][Use<kStages>(step).slot], column, task.result_head,
             chunk_of_step<C>(task, step));
    };
    // of the turn before
    auto load_results = [&](int step) {
        auto& columns = smem.stages[Use<kStages>(step).slot].columns[walker];
        wait_written(task.written - g.ctas * C::kWalkers + walker, step + 1);
        if constexpr (C::kIsLeft) {
            load_earlier(smem.earlier.of_walker[walker], g.dq.chunk, step);
            wait(smem.keys_read[walker], step & 1);
            load_earlier(columns.keys, g.dk.chunk, step);
        } else {
            load_earlier(columns.earlier, g.dk.chunk, step);
        }
    };
    auto store = [&](const ResultMaps& to, const void* tile, int chunk) {
        store_chunk(task, g.packed(), to.chunk, to.box, to.row, tile, chunk,
                    [&](const TensorMap& map, uint32_t from, int row) {
                        map.store_panel(from, column, row, task.result_head, task.batch);
                    });
    };
#pragma unroll 1
    for (int step = 0; step < task.chunks + kStages; step++) {
        const auto [slot, phase] = Use<kStages>(step);
        auto& columns = smem.stages[slot].columns[walker];
        const int stored = step - kStages;
        if (stored >= 0) {
            const int chunk = chunk_of_step<C>(task, stored);
            wait(smem.out_ready[walker][slot], phase ^ 1);
            if constexpr (C::kIsLeft) {
                store(g.dq, &columns.queries, chunk);
                store(g.dk, &columns.keys, chunk);
            } else {
                store(g.dk, &columns.earlier, chunk);
            }
            wait_stores_read();
            __syncwarp();
        }
        if (step < task.chunks) {
            const int chunk = chunk_of_step<C>(task, step);
            load(columns.queries, g.q, smem.arrived[slot], column, task.key_head, chunk);
            load(columns.keys, g.k, smem.arrived[slot], column, task.key_head, chunk);
            if constexpr (!C::kIsLeft)
                if (task.turn == 0) load_earlier(columns.earlier, g.left, step);
        }
        if (stored >= 0 && task.turn + 1 < g.turns()) publish_written(task.written + walker, stored + 1);
        // NOTES: of the chunk that the walker is at, and no sooner: results that are ready would wait
        // meanwhile
        const int next = stored + 1;
        if (task.turn > 0 && next >= 0 && next < task.chunks) load_results(next);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::delta_rule
