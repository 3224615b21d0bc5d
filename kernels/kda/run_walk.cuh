// The kernel of a walk over the chunks: the delta rule's, of what the matrices kernel leaves
// (bindings/params.h). One CTA owns a (sequence, head, 64 or 128 columns of V):
//   producer      a warp loads what the matrices kernel has left; one for each walker loads values and stores
//                 results (producer.cuh)
//   walkers       one or two, the state in registers (forward/walker.cuh, backward/walker.cuh)
#pragma once

#include "common/kernel.cuh"
#include "kda/producer.cuh"

namespace tfla_tk::kda {

template <class Walker> __device__ inline void run_walk(const WalkGlobals& g) {
    using C = typename Walker::Config;
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<WalkMemory<C>*>(shared_memory);
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    for (int i = threadIdx.x; i < C::kDimK; i += C::kThreads) smem.ones[i] = 1.f;
    if (!begin_task<C>(g, smem, blockIdx.x, [&] {
            g.tiles.prefetch(), g.a.prefetch(), g.p.prefetch(), g.values.prefetch(),
                g.results.chunk.prefetch();
        }))
        return;
    if (warp < 4) {
        set_registers<C::kProducerRegisters, C::kThreads, 1>();
        if (warp == 0 && fresh_laneid() == 0)
            TilesLoader<C>(g, smem).run();
        else if (warp >= 2 && warp - 2 < C::kWalkers)
            load_values_and_store_results(g, smem, warp - 2);
    } else {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        typename Walker::Registers registers;
        Walker{{g, smem, warp / 4 - 1}, registers}.walk();
    }
}

}  // namespace tfla_tk::kda
