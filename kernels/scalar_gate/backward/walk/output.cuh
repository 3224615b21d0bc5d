// Factor and results of the backward's walks. One warp loads panels of 64 columns of the factor, and stores
// the gradient that the state warpgroups write in their place. Another warp adds up row sums.
#pragma once

#include "common/store_rows.cuh"
#include "common/tile_loader.cuh"
#include "common/tiles.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// Stores 64 columns of a chunk's gradient, by one warp.
template <class C>
__device__ inline void store_out(const PassGlobals& g, const PassTask& task, const typename C::OutTile& out,
                                 int column, int chunk) {
    store_rows(task, g.packed(), g.out, g.out_row, &out, chunk,
               [&](const TensorMap& map, uint32_t from, int row) {
                   if (C::kSumsRows && task.share > 0)
                       map.add_panel(from, column, row, task.head, task.batch);
                   else
                       map.store_panel(from, column, row, task.head, task.batch);
               });
}

// The block index that a CTA works on. Shares wait for each other, so where there are several, clusters draw
// tickets in the order in which they start. A share then only waits for a lower ticket, whose CTA already
// runs.
template <class C> __device__ inline int block_of_pass(const PassGlobals& g, PassMemory<C>& smem) {
    if constexpr (C::kSumsRows && C::kDimKeys == kMostKeys) {  // otherwise there is one share
        if (g.ticket != nullptr) {
            if (threadIdx.x == 0 && cta_in_cluster() == 0) smem.ticket = atomicAdd(g.ticket, 1);
            cluster_sync();
            return of_first_cta(smem.ticket) * cluster_ctas() + cta_in_cluster();
        }
    }
    return blockIdx.x;
}

// Shares write a chunk of the gradient in order: the first stores it, each later one adds to it. This counts
// those that are done.
template <class C>
__device__ inline int* shares_stored(const PassGlobals& g, const PassTask& task, int chunk) {
    ChunkGates& gates = g.gates[task.batch_head * g.slots + task.slot + chunk];
    return &gates.stored[C::kBackward][task.column / C::kSlice];
}
template <class C>
__device__ inline void wait_for_turn(const PassGlobals& g, const PassTask& task, int chunk) {
    if (task.share == 0) return;
    wait_for_cta(100, [&] { return acquire_from_device(shares_stored<C>(g, task, chunk)) >= task.share; });
    fence_async_global();
}
template <class C>
__device__ inline void hand_on_turn(const PassGlobals& g, const PassTask& task, int chunk) {
    const int stored = task.share + 1;
    if (stored == g.shares) return;
    wait_stores_done();  // each lane waits for its own stores
    fence_async_global();
    __syncwarp();
    if (fresh_laneid() == 0) release_to_device(shares_stored<C>(g, task, chunk), stored);
}

// NOTES: a warp of its own: in the warp that loads the other tiles, keys and queries would wait for the
// stores and for other shares.
template <class C>
__device__ inline void load_factor_and_store_outputs(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    const bool has_factor = g.has_factor<C>();
    const int factor_head = task.values_head<C>();
    TileLoader load{task, g.packed(), smem.factor_tail_landed};
    auto load_factor = [&](int step, int panel) {
        if (!has_factor || step >= task.chunks) return;
        const int block = panel / C::kStateWarpgroups, warpgroup_id = panel % C::kStateWarpgroups;
        const int slot = C::out(step, block).slot;
        load(smem.out[slot][warpgroup_id], g.factor, smem.factor_arrived[slot][warpgroup_id],
             task.panel_column<C>(block, warpgroup_id), factor_head, C::chunk(task, step));
    };
    constexpr int kPanels = C::kBlocks * C::kStateWarpgroups;
    constexpr int kAhead = C::kOutStages / C::kBlocks;  // steps
    for (int step = 0; step < kAhead; step++)
        for (int panel = 0; panel < kPanels; panel++) load_factor(step, panel);
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::chunk(task, step);
        if constexpr (C::kSumsRows) wait_for_turn<C>(g, task, chunk);
#pragma unroll 1
        for (int panel = 0; panel < kPanels; panel++) {
            const int block = panel / C::kStateWarpgroups, warpgroup_id = panel % C::kStateWarpgroups;
            const int column = task.panel_column<C>(block, warpgroup_id);
            const auto [slot, phase] = C::out(step, block);
            wait(smem.out_ready[slot][warpgroup_id], phase);
            store_out<C>(g, task, smem.out[slot][warpgroup_id], column, chunk);
            wait_stores_read();
            __syncwarp();  // every lane has waited for its own stores
            if (has_factor)
                load_factor(step + kAhead, panel);
            else
                arrive_warp(smem.out_free[slot][warpgroup_id]);
        }
        if constexpr (C::kSumsRows) hand_on_turn<C>(g, task, chunk);
    }
}

// Adds up the state warpgroups' partial sums of out . factor over the CTA's slice and stores them, by one
// warp. NOTES: not by the scores' warps: a branch by lane makes their loop non-uniform to ptxas, and every
// GEMM's descriptors would go through per-lane registers.
template <class C> __device__ inline void store_row_sums(const PassGlobals& g, PassMemory<C>& smem) {
    static_assert(C::kBlocks == 1, "row sums have one place per step");
    const PassTask& task = smem.task;
    const int slice = task.share_and_slice<C>(g);
    const int ids = min(C::kStateWarpgroups,
                        (g.dim_values - task.column + kPanelColumns - 1) / kPanelColumns);  // with columns
    for (int step = 0; step < task.chunks; step++) {
        const auto [slot, phase] = C::tile(step + C::kStages);
        const int chunk = C::chunk(task, step), lane = fresh_laneid(), t = chunk * kChunk + 2 * lane;
        float2 whole{0.f, 0.f};
        FlowSum flow{0.f, 0.f};
        wait_free(smem.keys_free[slot][0], phase);  // the state warps are done with the step
#pragma unroll 1
        for (int id = 0; id < ids; id++) {
            const PartialSums& sums = smem.sums[slot][id];
#pragma unroll
            for (const auto& of_warp : sums.whole) {
                const float2 x = reinterpret_cast<const float2*>(of_warp)[lane];
                whole = {whole.x + x.x, whole.y + x.y};
            }
            const float4 x = reinterpret_cast<const float4*>(sums.inter)[lane];
            flow.value += (x.x + x.y) + (x.z + x.w);
            flow.squares += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
        }
        const float slow = smem.sums[slot][0].slow;
        arrive_warp(smem.row_sums_free[slot]);
        float* rows = g.whole + slice * g.whole_stride + task.row;
        if (t < task.tokens) rows[t] = whole.x;
        if (t + 1 < task.tokens) rows[t + 1] = whole.y;
        flow = {warp_sum(flow.value), warp_sum(flow.squares)};
        FlowSum* inter = g.inter + slice * g.inter_stride + task.batch_head * g.slots + task.slot;
        if (lane == 0) inter[chunk] = slow > 0.f ? FlowSum{kNotSummed, slow * flow.squares} : flow;
    }
}

}  // namespace tfla_tk::mlstm
