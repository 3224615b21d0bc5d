// The warp of n in the forward up to K = 128: n in registers.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/narrow/config.cuh"

namespace tfla_tk::mlstm {

// A lane has 2 kPairs neighbouring rows of K. Per chunk: publish n for Q [C, n], then n = decay n + the sums
// of the chunk's scaled keys.
template <class C> __device__ inline void carry_norm(const Globals& g, SharedMemoryPlan<C>& smem) {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    constexpr int kPairs = C::kDimQK / 64;
    constexpr uint32_t kPanelBytes = C::StateTile::rows * kPanelColumns * sizeof(T);
    const Task& task = smem.task;
    const int lane = fresh_laneid(), row = 2 * kPairs * lane;
    const int column = row % kPanelColumns;  // of C^T, within its panel
    const uint32_t panel = shared_address(&smem.state[0]) + row / kPanelColumns * kPanelBytes;

    float2 n[kPairs];
    const float* initial = task.initial_n(g);
    auto entry = [&](int at) { return initial && at < g.dim_qk ? initial[at] : 0.f; };
#pragma unroll
    for (int p = 0; p < kPairs; p++) n[p] = {entry(row + 2 * p), entry(row + 2 * p + 1)};

    // writes n as a high and a low part of type T below C^T
    auto publish = [&](int chunk) {
        T2 high[kPairs], low[kPairs];
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
            const HighAndLow<T2> parts(n[p]);
            high[p] = parts.high, low[p] = parts.low;
        }
        auto store = [&](int operand_row, const T2(&parts)[kPairs]) {
            store_shared(panel + panel_offset(operand_row, column / 8) + column % 8 * sizeof(T), parts);
        };
        wait_free(smem.state_free[0], chunk & 1);
        store(C::kPassV, high), store(C::kPassV + 1, low);
        fence_async_proxy();
        arrive_warp(smem.state_ready[0]);
    };
    auto leave = [&](float* to) {
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
            if (row + 2 * p < g.dim_qk) to[row + 2 * p] = n[p].x;
            if (row + 2 * p + 1 < g.dim_qk) to[row + 2 * p + 1] = n[p].y;
        }
    };
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        publish(chunk);
        if (task.leaves_state(chunk) && task.column == 0)
            leave(g.left.norms + static_cast<int64_t>(task.state_slot(chunk)) * g.dim_qk);
        const auto gates = C::gate_stage(chunk);
        wait(smem.gates_ready[gates.slot], gates.phase);
        const float decay = smem.gates[gates.slot].decay;
        arrive_warp(smem.gates_free[gates.slot]);
        const auto stage = C::sum_stage(chunk);
        wait(smem.key_sums_ready[stage.slot], stage.phase);
        const auto* sums = reinterpret_cast<const float2*>(&smem.key_sums[stage.slot][row]);
#pragma unroll
        for (int p = 0; p < kPairs; p++) n[p] = {decay * n[p].x + sums[p].x, decay * n[p].y + sums[p].y};
    }

    if (g.last.n && task.last && task.column == 0) leave(g.last.n + task.index * g.dim_qk);
}

}  // namespace tfla_tk::mlstm
