// The scorer: a warpgroup of a walk. It makes the scores P of each chunk (bindings/params.h) before the
// walkers come to it. So P is neither stored nor loaded, and q is loaded once.
//   1. Wait for q, k and the log decay of a chunk.
//   2. Q K^T.
//   3. Multiply by s e^{b_i - b_j}, round, write P to the stage.
//   4. Arrive on the walkers' barrier. They wait for it alone: it stands for what the scorer has waited for,
//      too.
#pragma once

#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

template <class C, class Globals, class Memory>
__device__ inline void make_scores(const Globals& g, Memory& smem) {
    using T = typename C::T;
    constexpr int kKeys = 32;  // at once, to save registers
    const Task& task = smem.task;
    const int warp = warpgroup::warpid();
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const int chunk = C::kBackward ? task.chunks - 1 - step : step;
        const auto [slot, phase] = Use<C::kStages>(step);
        auto& stage = smem.stages[slot];
        const int tokens = task.tokens - chunk * kChunk;
        wait(smem.for_scorer[slot], phase);  // 1
#pragma unroll 1
        for (int first_key = 0; first_key < kChunk; first_key += kKeys) {
            rt_fl<16, kKeys> scores;
            issue_scores<T, C::kDimK>(scores, stage.queries, stage.keys, first_key);  // 2
            // NOTES: the gates are loaded while the GEMM runs
            ReadGates<kKeys> gates(smem.gates_of(slot).log2_decay, g.scale, first_key, warp);  // 3
            warpgroup::mma_async_wait<0>();
            pin(scores);
            gates.apply(scores, 0, tokens);
            store_panels<T, kChunk>(shared_address(&stage.p), 16 * warp, scores, first_key / 16);
        }
        fence_async_proxy();
        arrive_warp(smem.arrived[slot]);  // 4
    }
}

}  // namespace tfla_tk::delta_rule
