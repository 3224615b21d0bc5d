// Producer warps of the walks for the gradients of q and k: loads, factors of the gates, stores.
#pragma once

#include "common/bulk_load.cuh"
#include "delta_rule/backward/states/turns.cuh"

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
        const float2 kept = decays.to_end;
        load(step + ahead.kSteps);
        const auto [slot, phase] = Use<StatesMemory<C>::kStages>(step);
        wait_free(smem.free[slot], phase);
        StatesGates& gates = smem.gates[slot];
        const int lane = fresh_laneid();
        gates.read.write(lane, decays.to_token);
        gates.update.write(lane, update_part(beta, kept));
        write_pair(gates.rest, 2 * lane, rest_part(beta, kept));
        gates.log2_decay.write(lane, b);
        if (lane == 0) gates.decay = decays.whole;
        arrive_warp(smem.arrived[slot]);
    }
    wait_copies();
}

// CTAs that share results write those of a chunk in turn, the slices of V of one head and then those of the
// next. So the order of the sums is always the same. Each turn adds what the one before has stored to its own
// results in fp32 (turns.cuh). `written` counts the chunks of a CTA that are in device memory. Returns how
// many that are, at least `chunks`.
__device__ inline int wait_written(const int* written, int chunks) {
    wait_for_cta(32, [&] { return peek_from_device(written) >= chunks; });
    const int found = acquire_from_device(written);
    fence_async_global();
    return __shfl_sync(0xffffffff, found, 0);  // the first lane loads
}
__device__ inline void publish_written(int* written, int chunks) {
    wait_stores_done();  // each lane waits for its own stores
    fence_async_global();
    __syncwarp();
    if (fresh_laneid() == 0) release_to_device(written, chunks);
}

// One warp: q and k into a stage, and out of it the results, which the walkers have put in their places.
template <class C>
__device__ inline void load_columns_and_store_results(const StatesGlobals& g, StatesMemory<C>& smem) {
    constexpr int kStages = StatesMemory<C>::kStages;
    const StatesTask& task = smem.task;
    // the left walk needs q for the sums of dg alone
    const bool needs_queries = !C::kIsLeft || task.whole != nullptr;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1]);
    auto store = [&](const ResultMaps& to, const void* tile, int walker, int chunk) {
        store_chunk(task, g.packed(), to, tile, chunk, [&](const TensorMap& map, uint32_t from, int row) {
            map.store_panel(from, column_of_walker(task, walker), row, task.result_head, task.batch);
        });
    };
#pragma unroll 1
    for (int step = 0; step < task.chunks + kStages; step++) {
        const auto [slot, phase] = Use<kStages>(step);
        auto& columns = smem.stages[slot].columns;
        const int stored = step - kStages;
        if (stored >= 0) {
            const int chunk = chunk_of_step<C>(task, stored);
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++) {
                wait(smem.out_ready[walker][slot], phase ^ 1);
                if constexpr (C::kIsLeft) {
                    store(g.dq, &columns[walker].queries, walker, chunk);
                    store(g.dk, &columns[walker].keys, walker, chunk);
                } else {
                    store(g.dk, &columns[walker].earlier, walker, chunk);
                }
            }
            wait_stores_read();
            arrive_warp(smem.out_read[slot]);
        }
        if (step < task.chunks) {
            const int chunk = chunk_of_step<C>(task, step);
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++) {
                const int column = column_of_walker(task, walker);
                if (needs_queries)
                    load(columns[walker].queries, g.q, smem.arrived[slot], column, task.key_head, chunk);
                else if (fresh_laneid() == 0)
                    arrive(smem.arrived[slot]);
                load(columns[walker].keys, g.k, smem.arrived[slot], column, task.key_head, chunk);
            }
        }
        if (stored >= 0 && task.turn + 1 < g.turns()) publish_written(task.written, stored + 1);
    }
    wait_stores_done();
}

// One warp: what the walkers add their results to, those of the turn before. The right walk begins with the
// left part of dk. What has one place per walker is asked for once the walker is done with the chunk before:
// low bytes, and in the left walk all. NOTES: a warp of its own, since it waits for another CTA while results
// of this one may be ready to be stored and published.
template <class C> __device__ inline void load_earlier(const StatesGlobals& g, StatesMemory<C>& smem) {
    constexpr int kStages = StatesMemory<C>::kStages;
    const StatesTask& task = smem.task;
    const bool first = task.turn == 0;  // no turn is before it
    if (C::kIsLeft && first) return;
    const bool adds_low = !first && g.low != nullptr;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[2]);
    int written = 0;
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const auto [slot, phase] = Use<kStages>(step);
        const int chunk = chunk_of_step<C>(task, step);
        auto load_result = [&](auto& tile, const TensorMap& from, int walker) {
            load(tile, from, smem.earlier_arrived[walker][slot], column_of_walker(task, walker),
                 task.result_head, chunk);
        };
        auto load_nothing = [&](int walker) {
            if (fresh_laneid() == 0) arrive(smem.earlier_arrived[walker][slot]);
        };
        auto load_low = [&](int walker) {
            if (fresh_laneid() != 0) return;
            semaphore& arrived = smem.earlier_arrived[walker][slot];
            auto& to = smem.earlier.low[walker];
            kittens::tma::expect_bytes(arrived, sizeof(to));
            for (int result = 0; result < (C::kIsLeft ? 2 : 1); result++)
                load_bulk(&to[result], low_place<C>(g, task, chunk, walker, result), sizeof(LowBytes),
                          arrived);
        };
        auto wait_walker = [&](int walker) {  // until it has read the results before these
            if (step == 0) return;
            const Use<kStages> before(step - 1);
            wait(smem.out_ready[walker][before.slot], before.phase);
        };
        // before the wait for the place, so that the look at the other CTA's number takes no time behind it
        if (!first && written <= step) written = wait_written(task.written - g.ctas, step + 1);
        if constexpr (C::kIsLeft) {
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++) {
                wait_walker(walker);
                load_result(smem.earlier.dq[walker], g.dq.chunk, walker);
                load_result(smem.earlier.left[walker], g.dk.chunk, walker);
                if (adds_low)
                    load_low(walker);
                else
                    load_nothing(walker);
            }
        } else {
            wait_free(smem.out_read[slot], phase);
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++)
                load_result(smem.stages[slot].columns[walker].earlier, first ? g.left : g.dk.chunk, walker);
#pragma unroll 1
            for (int walker = 0; walker < C::kWalkers; walker++) {
                if (adds_low)
                    wait_walker(walker), load_low(walker);
                else
                    load_nothing(walker);
            }
        }
    }
}

}  // namespace tfla_tk::delta_rule
