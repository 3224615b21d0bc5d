// Makers: warpgroups of a walk's CTA that make A and P of its chunks ahead of the walker, in turns. So
// neither crosses device memory.
//
// Two CTAs that own neighbouring columns of one head form a cluster. Each makes the matrices of every second
// chunk, and sends them to the other one.
#pragma once

#include "delta_rule/chunk_matrices/freed.cuh"
#include "delta_rule/chunk_matrices/warpgroup.cuh"

namespace tfla_tk::delta_rule {

// CTAs of a cluster. ctas: of a sequence and head.
inline int makers_cluster(int makers, int ctas) { return makers > 0 && ctas % 2 == 0 ? 2 : 1; }

// By whom the matrices of a step of the walk are made.
struct MakersTurn {
    int cta, maker;

    __device__ inline MakersTurn(int step, int makers)
        : cta(step & (cluster_ctas() - 1)), maker((step >> (cluster_ctas() - 1)) % makers) {}
};

// The maker-th of C::kMakers. chunk_of: the chunk of a step of the walk.
template <class C, bool kBetaOnRows, class Globals, class Memory, class ChunkOf>
__device__ inline void make_matrices(const Globals& g, Memory& smem, int maker, ChunkOf chunk_of) {
    const auto& task = smem.task;
    auto meet = [&] { named_sync<128>(NamedBarrier::matrix_written, maker); };
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const MakersTurn turn(step, C::kMakers);
        if (turn.cta != cta_in_cluster() || turn.maker != maker) continue;
        const int before = step - C::kMatrixStages;  // whose matrices' place these take
        auto& matrices = smem.matrices[Use<C::kMatrixStages>(step).slot];
        auto& ready = smem.ready[Use<C::kReadyStages>(step).slot];
        const Use<C::kStages> use(step);
        auto& stage = smem.stages[use.slot];
        wait(smem.arrived[use.slot], use.phase);
        make_matrices_of_chunk<typename C::T, C::kDimK, kBetaOnRows>(
            stage.queries, stage.keys, smem.matrix_gates[use.slot], smem.triangular[maker], matrices, g.scale,
            task.tokens - chunk_of(step) * kChunk, meet, [&] {
                MatricesFreed::wait_for(smem.freed.here, before);
                if (cluster_ctas() > 1) MatricesFreed::wait_for(smem.freed.there, before);
            });
        fence_async_proxy();
        meet();
        if (warpgroup::warpid() != 0) continue;
        if (cluster_ctas() > 1) {
            __syncwarp();  // NOTES: makes it a branch: without a cluster the predicated copy is an illegal
                           // instruction
            if (fresh_laneid() == 0) send_to_cta(&matrices, sizeof(matrices), ready, 1 - cta_in_cluster());
            __syncwarp();
        }
        arrive_warp(ready);
    }
}

// Expects the matrices that the other CTA makes, by one warp. So no maker waits for the place of these.
template <class C, class Memory> __device__ inline void receive_matrices(Memory& smem) {
#pragma unroll 1
    for (int step = 0; step < smem.task.chunks; step++) {
        if (MakersTurn(step, C::kMakers).cta == cta_in_cluster()) continue;
        MatricesFreed::wait_for(smem.freed.here, step - C::kMatrixStages);
        arrive_warp_expecting(smem.ready[Use<C::kReadyStages>(step).slot], sizeof(smem.matrices[0]));
    }
}

}  // namespace tfla_tk::delta_rule
