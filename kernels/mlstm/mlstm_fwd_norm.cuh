// Normaliser warp of the mLSTM forward: n in registers, published beside C.
#pragma once

#include "config.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

// n = decay n + the sums of a chunk's scaled keys, which the state's warps leave in shared memory. Lane l has
// rows l, l + 32, .. of every part.
template <class C> __device__ inline void walk_norm(const Globals& g, SharedMemoryPlan<C>& smem) {
    using T = typename C::T;
    constexpr int kRows = C::kPartQK / 32;
    constexpr uint32_t kPanelBytes = C::StateTile::rows * kPanelColumns * sizeof(T);
    const Task& task = smem.task;
    const int lane = fresh_laneid();

    const uint32_t panels = shared_address(&smem.state[0]);
    const uint32_t high = panel_offset(C::kPassV, lane / 8) + lane % 8 * 2;
    const uint32_t low = panel_offset(C::kPassV + 1, lane / 8) + lane % 8 * 2;

    float norm[C::kParts][kRows];
    auto for_each = [&](int part, auto body) {
#pragma unroll
        for (int n = 0; n < kRows; n++) {
            const int row = 32 * n + lane;
            body(norm[part][n], row, part * C::kPartQK + row);
        }
    };
    // as a high and a low part, below C^T
    auto publish = [&](int part, int chunk) {
        wait_free(smem.state_free[0][part], chunk & 1);
#pragma unroll
        for (int n = 0; n < kRows; n++)
            store_parts<T>(panels + (part * C::kPartQK / 64 + n / 2) * kPanelBytes + n % 2 * 64, high, low,
                           norm[part][n]);
        fence_async_proxy();
        arrive_warp(smem.state_ready[0][part]);
    };

    const float* initial = task.initial_n(g);
#pragma unroll
    for (int part = 0; part < C::kParts; part++) {
        for_each(part, [&](float& x, int, int row) { x = initial && row < g.dim_qk ? initial[row] : 0.f; });
        publish(part, 0);
    }
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto stage = C::gate_stage(chunk);
        wait(smem.gates_ready[stage.slot], stage.phase);
        const float decay = smem.gates[stage.slot].decay;
#pragma unroll
        for (int part = 0; part < C::kParts; part++) {
            wait(smem.sums_ready[part], chunk & 1);
            for_each(part,
                     [&](float& x, int row, int) { x = decay * x + smem.key_sums[part][chunk & 1][row]; });
            if (chunk + 1 < task.chunks) publish(part, chunk + 1);
        }
        arrive_warp(smem.gates_free[stage.slot]);
    }
    if (!g.last.n || !task.last || task.column != 0) return;
#pragma unroll
    for (int part = 0; part < C::kParts; part++)
        for_each(part, [&](float x, int, int row) {
            if (row < g.dim_qk) g.last.n[task.index * g.dim_qk + row] = x;
        });
}

}  // namespace tfla_tk::mlstm
