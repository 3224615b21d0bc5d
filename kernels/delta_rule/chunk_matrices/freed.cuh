// When the place of a chunk's matrices may be written to again.
#pragma once

#include "common/cluster.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

// The steps whose matrices are no longer read: by the walkers of this CTA, and by those of the other one.
// NOTES: with four barriers each is one maker's, who waits for every phase of it.
struct MatricesFreed {
    static constexpr int kSlots = 4;
    semaphore here[kSlots], there[kSlots];

    __device__ inline void init(int walkers) {
        for (auto& barrier : here) init_warp_barrier(barrier, 4 * walkers);
        for (auto& barrier : there) init_warp_barrier(barrier, 4);
    }
    // By every warp of a walker. NOTES: without a cluster its own CTA is the other one, and nobody waits
    // there.
    template <bool kMade> __device__ inline void tell(int step) {
        const int slot = Use<kSlots>(step).slot;
        arrive_warp(here[slot]);
        if constexpr (kMade) arrive_warp_in_cta(there[slot], cta_in_cluster() ^ (cluster_ctas() - 1));
    }
    // Until those of a step, which may be one before the first, are freed.
    __device__ inline static void wait_for(semaphore (&freed)[kSlots], int step) {
        if (step < 0) return;
        const Use<kSlots> use(step);
        wait(freed[use.slot], use.phase);
    }
};

}  // namespace tfla_tk::delta_rule
