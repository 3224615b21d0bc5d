// Makers: warpgroups of a walk's CTA that make A and P of its chunks ahead of the walker, in turns. So
// neither crosses device memory.
//
// Two CTAs that own neighbouring columns of one head form a cluster. Each makes the matrices of every second
// chunk, and sends them to the other one.
#pragma once

#include "common/cluster.cuh"
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

// The steps of which the other CTA's walker no longer reads the matrices, by barriers of this CTA.
// NOTES: their even number gives each barrier to one maker, who waits for every phase of it.
struct FreedByOther {
    static constexpr int kSlots = 4;
    semaphore freed[kSlots];

    __device__ inline void init() {
        for (auto& barrier : freed) init_warp_barrier(barrier, 4);
    }
    // By every warp of the walker. NOTES: without a cluster its own CTA is the other one, and nobody waits.
    __device__ inline void tell(int step) const {
        arrive_warp_in_cta(freed[Use<kSlots>(step).slot], cta_in_cluster() ^ (cluster_ctas() - 1));
    }
    __device__ inline void wait_for(int step) {
        const Use<kSlots> use(step);
        wait(freed[use.slot], use.phase);
    }
};

// The maker-th of C::kMakers. chunk_of: the chunk of a step of the walk.
template <class C, bool kBetaOnRows, class Globals, class Memory, class ChunkOf>
__device__ inline void make_matrices(const Globals& g, Memory& smem, int maker, ChunkOf chunk_of) {
    const auto& task = smem.task;
    auto meet = [&] { named_sync<128>(NamedBarrier::matrix_written, maker); };
#pragma unroll 1
    for (int step = 0; step < task.chunks; step++) {
        const MakersTurn turn(step, C::kMakers);
        if (turn.maker != maker) continue;
        const int before = step - C::kReadyStages;  // whose matrices' place these take
        const int slot = Use<C::kReadyStages>(step).slot;
        auto& matrices = smem.ready_stages[slot].matrices;
        constexpr uint32_t kBytes = sizeof(matrices.a) + sizeof(matrices.p);
        if (before >= 0) {
            const Use<C::kStages> use(before);
            wait(smem.free[use.slot], use.phase);
        }
        if (turn.cta != cta_in_cluster()) {
            if (warpgroup::warpid() == 0)
                arrive_warp_expecting(smem.ready[slot], kBytes);
            else
                arrive_warp(smem.ready[slot]);
            continue;
        }
        if (cluster_ctas() > 1 && before >= 0) smem.freed_by_other.wait_for(before);
        const Use<C::kStages> use(step);
        auto& stage = smem.stages[use.slot];
        wait(smem.arrived[use.slot], use.phase);
        make_matrices_of_chunk<typename C::T, C::kDimK, kBetaOnRows>(
            stage.queries, stage.keys, stage.matrix_gates, matrices, g.scale,
            task.tokens - chunk_of(step) * kChunk, meet);
        fence_async_proxy();
        if (cluster_ctas() > 1) {
            meet();
            if (warpgroup::warpid() == 0 && fresh_laneid() == 0)
                send_to_cta(&matrices, kBytes, smem.ready[slot], 1 - cta_in_cluster());
        }
        arrive_warp(smem.ready[slot]);
    }
}

}  // namespace tfla_tk::delta_rule
