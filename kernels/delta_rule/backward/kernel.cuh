// The mirror: a walk of the delta rule's backward from the last chunk to the first. With K up to 128 it
// leaves nothing but states, for a split; with a wide K it makes dV. One CTA owns a (segment of a sequence,
// head, 64 or 128 columns of V):
//   producer      loads q, k, dO, A and, with a wide K, P and the writes; scans the gates; stores dV
//   walkers       one or two, the state's gradient in registers (walker.cuh, wide_walker.cuh)
//   scorer        makes P with K up to 128 (scorer.cuh)
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
                with_gate_ring(smem.gate_ring, [&](auto& ring) { scan_gates(g, smem, ring); });
            else if (C::kIsWide && warp - 2 < C::kWalkers)
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
