// Producer warps of a pair of the mirror (pair.cuh).
#pragma once

#include "delta_rule/backward/pair.cuh"
#include "delta_rule/backward/producer.cuh"

namespace tfla_tk::delta_rule {

// One warp: what the chain walker reads.
template <class C>
__device__ inline void load_chain_tiles(const MirrorGlobals& g, MirrorPairMemory<C>& smem) {
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[0]);
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<C::kStages>(step);
        ChainStage<C>& stage = smem.stages[slot];
        semaphore& arrived = smem.arrived[slot];
        wait_free(smem.free[slot], phase);
        load(stage.keys, g.k, arrived, 0, task.key_head, chunk);
        load(stage.queries, g.q, arrived, 0, task.key_head, chunk);
        if (fresh_laneid() == 0) {
            tma::expect_bytes(arrived, C::Square::loaded_bytes);
            load_matrix(g, task, g.a, stage.a, arrived, chunk);
        }
    }
}

// One warp: what the side walker reads, and the stores of dV. P and dO of a step are asked for as soon as
// there is room, the writes of the step before and the store of three steps before after that: they wait for
// what is later.
template <class C>
__device__ inline void load_side_tiles_and_store(const MirrorGlobals& g, MirrorPairMemory<C>& smem) {
    constexpr int kSideStages = MirrorPairMemory<C>::kSideStages;
    const Task& task = smem.task;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[1]);
#pragma unroll 1
    for (int step = 0; step <= task.chunks + kSideStages; step++) {
        if (step < task.chunks) {
            const int chunk = task.chunks - 1 - step;
            const auto [slot, phase] = Use<kSideStages>(step);
            semaphore& arrived = smem.side_arrived[slot];
            wait_free(smem.side_free[slot], phase);
            load(smem.side_stages[slot].dout, g.dout, arrived, task.column, task.head, chunk);
            if (fresh_laneid() == 0) {
                tma::expect_bytes(arrived, C::Square::loaded_bytes);
                load_matrix(g, task, g.p, smem.side_stages[slot].p, arrived, chunk);
            }
        }
        if constexpr (C::kStatesAlone) continue;
        const int stored = step - 1 - kSideStages, asked = step - 1;
        if (stored >= 0) {
            const Use<C::kStages> use(stored);
            wait(smem.side_done[use.slot], use.phase);
            store_chunk(task, g.packed(), g.dv, g.dv_box, g.dv_row, &smem.dv, task.chunks - 1 - stored,
                        [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, task.column, row, task.head, task.batch);
                        });
        }
        if (asked >= 0 && asked < task.chunks) {
            const int slot = Use<kSideStages>(asked).slot;
            load(smem.writes[slot], g.writes, smem.writes_arrived[slot], task.column, task.head,
                 task.chunks - 1 - asked);
        }
        if (stored >= 0) {
            wait_stores_read();
            arrive_warp(smem.dv_free);
        }
    }
    wait_stores_done();
}

template <class C>
__device__ inline void produce_for_pair(const MirrorGlobals& g, MirrorPairMemory<C>& smem) {
    const int warp = warpgroup::warpid();
    if (warp == 0)
        load_chain_tiles(g, smem);
    else if (warp == 1)
        load_side_tiles_and_store(g, smem);
    else
        scan_gates<C, MirrorPairMemory<C>::kGateWarps>(g, smem, smem.ring_of(warp - 2), warp - 2);
}

}  // namespace tfla_tk::delta_rule
