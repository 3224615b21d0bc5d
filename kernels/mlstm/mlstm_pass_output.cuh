// Stores of the mLSTM backward's passes: one warp sends to global memory what the state warpgroups leave in
// shared memory.
#pragma once

#include "mlstm_pass_config.cuh"
#include "tfla_tk/cluster.cuh"
#include "tfla_tk/store_rows.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

// 64 columns of a chunk's gradient.
template <class C>
__device__ inline void store_out(const PassGlobals& g, const PassTask& task, const typename C::OutTile& out,
                                 int column, int chunk) {
    store_rows(task, g.packed(), g.out, g.out_row, &out, chunk,
               [&](const TensorMap& map, uint32_t from, int row) {
                   if (C::kNormalizer && task.share > 0)
                       map.add_panel(from, column, row, task.head, task.batch);
                   else
                       map.store_panel(from, column, row, task.head, task.batch);
               });
}

// The sums of a chunk's out . factor over 64 columns.
template <class C>
__device__ inline void store_sums(const PassGlobals& g, const PassTask& task, const PartialSums& sums,
                                  int column, int chunk) {
    const int panels = (g.dim_values + kSumColumns - 1) / kSumColumns;
    const int panel = task.share * panels + column / kSumColumns, lane = fresh_laneid();
    float* whole = g.whole + panel * g.whole_stride + task.row;
#pragma unroll
    for (int row = 0; row < kChunk; row += 32)
        if (const int t = row + lane; chunk * kChunk + t < task.tokens)
            whole[chunk * kChunk + t] =
                (sums.whole[0][t] + sums.whole[1][t]) + (sums.whole[2][t] + sums.whole[3][t]);
    const float4 x = reinterpret_cast<const float4*>(sums.inter)[lane];
    const float value = warp_sum((x.x + x.y) + (x.z + x.w));
    const float squares = warp_sum((x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w));
    if (lane == 0)
        g.inter[panel * g.inter_stride + task.batch_head * g.slots + task.slot + chunk] = {value, squares};
}

// Shares take turns at a chunk of the gradient: the first one stores, each later one adds to that.
template <class C> __device__ inline void wait_for_turn(const PassMemory<C>& smem, int step) {
    if (smem.task.share == 0) return;
    while (acquire_from_cta(&smem.steps_stored) <= step) __nanosleep(100);
    fence_async_global();
}
template <class C> __device__ inline void hand_on_turn(const PassGlobals& g, PassMemory<C>& smem, int step) {
    const int next = smem.task.share + 1;
    if (next == g.shares) return;
    wait_stores_done();  // each lane for its own
    fence_async_global();
    __syncwarp();
    if (fresh_laneid() == 0) release_to_cta(&smem.steps_stored, next, step + 1);
}

template <class C> __device__ inline void store_outputs(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    for (int step = 0; step < task.chunks; step++) {
        if constexpr (C::kNormalizer) wait_for_turn(smem, step);
#pragma unroll 1
        for (int panel = 0; panel < C::kBlocks * C::kStateWarpgroups; panel++) {
            const int block = panel / C::kStateWarpgroups, warpgroup_id = panel % C::kStateWarpgroups;
            const int column = task.panel_column<C>(block, warpgroup_id);
            const int chunk = C::chunk(task, step);
            const auto [slot, phase] = C::out(step, block);
            wait(smem.out_ready[slot][warpgroup_id], phase);
            store_out<C>(g, task, smem.out[slot][warpgroup_id], column, chunk);
            if constexpr (C::kNormalizer)
                if (column < g.dim_values)
                    store_sums<C>(g, task, smem.sums[slot][warpgroup_id], column, chunk);
            wait_stores_read();
            arrive_warp(smem.out_free[slot][warpgroup_id]);
        }
        if constexpr (C::kNormalizer) hand_on_turn(g, smem, step);
    }
}

}  // namespace tfla_tk::mlstm
