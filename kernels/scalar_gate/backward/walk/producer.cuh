// Producer warpgroup of the backward's walks, without the warps of output.cuh: TMA loads, gates.
#pragma once

#include "common/tile_loader.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// Loads queries, keys and values into their rings, by one warp. dk also prefetches dq's anchors into L2.
template <class C> __device__ inline void load_pass_tiles(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    TileLoader load{task, g.packed(), smem.tail_landed};
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::chunk(task, step);
        const auto [slot, phase] = C::tile(step);
        if constexpr (C::kGradient == Gradient::dk)
            if (task.anchored(chunk) && fresh_laneid() == 0)
                prefetch_bulk(task.anchor_memory<C>(g, chunk), C::kAnchorBytes);
        for (int part = 0; part < C::kParts; part++) {
            wait_free(smem.keys_free[slot][part], phase);
            const int column = task.keys_column<C>() + part * C::kPart;
            load(smem.keys[slot][part], g.keys, smem.keys_arrived[slot][part], column, task.keys_head<C>(),
                 chunk);
            wait_free(smem.queries_free[slot][part], phase);
            load(smem.queries[slot][part], g.queries, smem.queries_arrived[slot][part], column,
                 task.keys_head<C>(), chunk);
        }
        wait_free(smem.values_free[slot], phase);
        load(smem.values[slot], g.values, smem.values_arrived[slot], task.column, task.values_head<C>(),
             chunk);
    }
}

template <class C> __device__ inline void feed_gates(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    if (task.chunks == 0) return;
    DeferredDecay<typename C::T> owed;
    // defer nothing at the walk's end and where the state is stored (dq) or multiplied with that (dk)
    auto settles = [&](int step) {
        const int chunk = C::chunk(task, step);
        return step + 1 == task.chunks || (C::kGradient == Gradient::dq && task.anchored(chunk + 1)) ||
               (C::kGradient == Gradient::dk && task.anchored(chunk));
    };
    auto load = [&](int step) {
        const int chunk = C::chunk(task, step);
        return LaneGates(g.gates[task.batch_head * g.slots + task.slot + chunk],
                         C::kNormalizer ? task.e_pair(g, chunk) : float2{0.f, 0.f});
    };
    if constexpr (C::kNormalizer) {
        for (auto& factors : smem.norm_keys) factors.clear();
        for (auto& factors : smem.norm_queries) factors.clear();
        if constexpr (C::kBackward) C::Norm::write_ones(smem.norm_queries[0]);
    }
    LaneGates gates = load(0);
    for (int step = 0; step < task.chunks; step++) {
        const auto [slot, phase] = C::gate_stage(step);
        const bool whole = (C::chunk(task, step) + 1) * kChunk <= task.tokens;
        wait_free(smem.gates_free[slot], phase);
        const float2 key = gates.template write<C::kBackward>(smem.gates[slot], owed, settles(step), whole);
        if constexpr (C::kNormalizer) {
            C::Norm::write_x(smem.norm_keys[slot], key, gates.e);
            if constexpr (!C::kBackward) C::Norm::write_e(smem.norm_queries[slot], gates.e);
            fence_async_proxy();
        }
        arrive_warp(smem.gates_ready[slot]);
        if (step + 1 < task.chunks) gates = load(step + 1);  // in flight during the wait for a free stage
    }
}

}  // namespace tfla_tk::mlstm
