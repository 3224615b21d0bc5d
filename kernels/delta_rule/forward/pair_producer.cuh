// Producer warps of a pair (pair.cuh).
#pragma once

#include "delta_rule/forward/pair.cuh"
#include "delta_rule/forward/producer.cuh"

namespace tfla_tk::delta_rule {

// One warp: what the chain walker reads.
template <class C> __device__ inline void load_chain_tiles(const ForwardGlobals& g, PairMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
    int made = 0;  // chunks whose matrices are known to be there
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        PairStage<C>& stage = smem.stages[slot];
        semaphore& arrived = smem.arrived[slot];
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, arrived, 0, task.key_head, chunk);
        load(stage.values, g.v, arrived, task.column, task.head, chunk);
        if (C::kMakerWarpgroups > 0 && chunk >= made) made = chunk + wait_made(g, task, chunk);
        if (fresh_laneid() == 0) {
            tma::expect_bytes(arrived, C::Square::loaded_bytes);
            load_matrix(g, task, g.a, stage.a, arrived, chunk);
            if constexpr (C::kMakerWarpgroups > 0) mark_loaded(g, task, chunk);
        }
    }
}

// One warp: what the output walker reads, and the stores of what it has made.
template <class C>
__device__ inline void load_output_tiles_and_store(const ForwardGlobals& g, PairMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1]);
    int made = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks + C::kStages; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        const int stored = chunk - C::kStages;
        const bool stores = stored >= 0 && stored < task.chunks;
        if (stores) {
            if (g.keep_writes) {
                wait(smem.writes_ready, stored & 1);
                store_columns(g, task, g.writes, g.writes_box, g.writes_row, &smem.writes, stored,
                              task.column);
            }
            wait(smem.out_ready[slot], phase ^ 1);
            store_columns(g, task, g.o, g.o_box, g.o_row, &smem.out, stored, task.column);
        }
        PairStage<C>& stage = smem.stages[slot];
        semaphore& asked = smem.asked[slot];
        const bool loads = chunk < task.chunks;
        if (loads) load(stage.queries, g.q, asked, 0, task.key_head, chunk);
        if (stores) {
            wait_stores_read();
            if (g.keep_writes) arrive_warp(smem.writes_free);
            arrive_warp(smem.out_free);
        }
        if (!loads) continue;
        // NOTES: last, since it may wait for a maker
        if (C::kMakerWarpgroups > 0 && chunk >= made) made = chunk + wait_made(g, task, chunk);
        if (fresh_laneid() == 0) {
            tma::expect_bytes(asked, C::Square::loaded_bytes);
            load_matrix(g, task, g.p, stage.p, asked, chunk);
        }
    }
    wait_stores_done();
}

template <class C> __device__ inline void produce_for_pair(const ForwardGlobals& g, PairMemory<C>& smem) {
    const int warp = warpgroup::warpid();
    if (warp == 0)
        load_chain_tiles(g, smem);
    else if (warp == 1)
        load_output_tiles_and_store(g, smem);
    else
        scan_gates<C, PairMemory<C>::kGateWarps>(g, smem, warp - 2);
}

}  // namespace tfla_tk::delta_rule
