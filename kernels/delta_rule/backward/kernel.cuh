// The mirror: the walk of the delta rule's backward from the last chunk to the first. One CTA owns a
// (sequence, head, 64 or 128 columns of V):
//   producer      loads q, k, dO, the writes, A and, without a scorer, P; scans the gates; stores dV and the
//                 right part of dk; adds up the walkers' sums for dbeta and dg and stores them
//   walkers       one or two, the state's gradient in registers (walker.cuh). With two walkers and
//                 64 < K <= 128 these may also make the right part of dk (right_part.cuh)
//   scorer        makes P where K and the walkers allow it (kMakesScores), also where the forward has kept
//                 one (scorer.cuh)
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/backward/config.cuh"
#include "delta_rule/backward/producer.cuh"
#include "delta_rule/backward/walker.cuh"
#include "delta_rule/backward/wide_walker.cuh"
#include "delta_rule/scorer.cuh"

namespace tfla_tk::delta_rule {

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_mirror_kernel(const __grid_constant__ MirrorGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<MirrorMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
        if (!begin_task<C>(g, smem, blockIdx.x,
                           [&] { g.q.prefetch(), g.k.prefetch(), g.dout.prefetch(), g.dv.chunk.prefetch(); }))
            return;
        if (warpgroup_id == 0) {
            set_registers<C::kProducerRegisters, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_tiles(g, smem);
            else if (warp == 1)
                scan_gates(g, smem);
            else if (!C::kStatesAlone && warp - 2 < C::kWalkers)
                store_gradients(g, smem, warp - 2);
        } else if (C::kHasScorer && warpgroup_id > C::kWalkers) {
            set_registers<C::kScorerRegisters, C::kThreads, 1>();
            if constexpr (C::kHasScorer) make_scores<C>(g, smem);
        } else {
            set_registers<C::kWalkerRegisters, C::kThreads, 1>();
            if constexpr (C::kIsWide)
                walk_mirror_wide(g, smem, warpgroup_id - 1);
            else
                walk_mirror(g, smem, warpgroup_id - 1);
        }
    }
}

}  // namespace tfla_tk::delta_rule
