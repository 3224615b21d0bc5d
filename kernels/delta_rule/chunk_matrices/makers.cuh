// Makers: warpgroups of a walk's CTA that make A and P of its chunks ahead of the walker, in turns. So
// neither crosses device memory.
#pragma once

#include "delta_rule/chunk_matrices/warpgroup.cuh"

namespace tfla_tk::delta_rule {

// The maker-th of C::kMakers. chunk_of: the chunk of a step of the walk.
template <class C, bool kBetaOnRows, class Globals, class Memory, class ChunkOf>
__device__ inline void make_matrices(const Globals& g, Memory& smem, int maker, ChunkOf chunk_of) {
    const auto& task = smem.task;
    auto meet = [&] { named_sync<128>(NamedBarrier::matrix_written, maker); };
#pragma unroll 1
    for (int step = maker; step < task.chunks; step += C::kMakers) {
        const Use<C::kStages> use(step);
        const int ready = Use<C::kReadyStages>(step).slot;
        auto& stage = smem.stages[use.slot];
        if (step >= C::kReadyStages) {  // the matrices whose place these take
            const Use<C::kStages> before(step - C::kReadyStages);
            wait(smem.free[before.slot], before.phase);
        }
        wait(smem.arrived[use.slot], use.phase);
        make_matrices_of_chunk<typename C::T, C::kDimK, kBetaOnRows>(
            stage.queries, stage.keys, stage.matrix_gates, smem.ready_stages[ready].matrices, g.scale,
            task.tokens - chunk_of(step) * kChunk, meet);
        fence_async_proxy();
        arrive_warp(smem.ready[ready]);
    }
}

}  // namespace tfla_tk::delta_rule
