// Producer warpgroup of the mLSTM backward's passes, but for the gradient and its factor: TMA loads, gate
// scan.
#pragma once

#include "mlstm_pass_config.cuh"
#include "tfla_tk/tile_loader.cuh"

namespace tfla_tk::mlstm {

// One warp feeds the rings.
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
            load(smem.keys[slot][part], g.keys, smem.keys_arrived[slot][part], column, chunk);
            wait_free(smem.queries_free[slot][part], phase);
            load(smem.queries[slot][part], g.queries, smem.queries_arrived[slot][part], column, chunk);
        }
        wait_free(smem.values_free[slot], phase);
        load(smem.values[slot], g.values, smem.values_arrived[slot], task.column, chunk);
    }
}

template <class C, bool kSigmoid>
__device__ inline void sum_gates(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    const GateRows input(g.i, task.batch, task.head, task.first_row);
    const GateRows forget(g.f, task.batch, task.head, task.first_row);
    auto load_f = [&](int step) {
        return step < task.chunks ? forget.pair(C::chunk(task, step), task.tokens, kNoForget)
                                  : float2{0.f, 0.f};
    };
    float2 f = load_f(0);
    for (int step = 0; step < task.chunks; step++) {
        const auto sums = C::gate_sums(step);
        const auto stage = C::gate_stage(step);
        wait_free(smem.gates_free[stage.slot], stage.phase);
        wait_free(smem.sums_free[sums.slot], sums.phase);
        sum_pass_gates<kSigmoid>(
            smem.gate_sums[sums.slot], smem.gates[stage.slot], f, g.log2_scale,
            [&] { return input.pair(C::chunk(task, step), task.tokens, kNoInput); },
            [&] { return load_f(step + 1); });
        arrive_warp(smem.sums_ready[sums.slot]);
    }
}

template <class C, bool kSigmoid>
__device__ inline void scale_gates(const PassGlobals& g, PassMemory<C>& smem) {
    const PassTask& task = smem.task;
    OwedDecay<typename C::T> owed;
    // at the walk's end, and where dq leaves its state or dk multiplies with its own
    auto settles = [&](int step) {
        const int chunk = C::chunk(task, step);
        return step + 1 == task.chunks || (C::kGradient == Gradient::dq && task.anchored(chunk + 1)) ||
               (C::kGradient == Gradient::dk && task.anchored(chunk));
    };
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::chunk(task, step);
        const float2 log2_w = task.pair(g.log2_w, chunk);
        const float2 e = C::kNormalizer ? task.e_pair(g, chunk) : float2{0.f, 0.f};
        const FloatPair m_in =
            kSigmoid ? FloatPair{}
                     : finite_stabiliser(g.chunk_m[task.batch_head * g.slots + task.slot + chunk]);
        const auto sums = C::gate_sums(step);
        const auto stage = C::gate_stage(step);
        wait(smem.sums_ready[sums.slot], sums.phase);  // after gates_free, on which the sums wait
        scale_pass_gates<kSigmoid, C::kBackward>(smem.gates[stage.slot], smem.gate_sums[sums.slot], owed,
                                                 settles(step), (chunk + 1) * kChunk <= task.tokens, m_in,
                                                 log2_w, e, g.scale);
        arrive_warp(smem.sums_free[sums.slot]);
        arrive_warp(smem.gates_ready[stage.slot]);
    }
}

}  // namespace tfla_tk::mlstm
