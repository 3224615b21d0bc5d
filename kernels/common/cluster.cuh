// CTAs of a cluster: their barrier, and what one of them writes into another one's shared memory.
#pragma once

#include <cstdint>

#include "common/sync.cuh"

namespace tfla_tk {

// CTAs of this cluster, and which of them this one is; 1 and 0 in a launch without clusters.
// NOTES: read anew at every call: registers.
__device__ inline int cluster_ctas() {
    int ctas;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
    return ctas;
}
__device__ inline int cta_in_cluster() {
    int cta;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(cta));
    return cta;
}

// Until all threads of the cluster are here.
__device__ inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::
            : "memory");
}

// The same in two halves, where nothing is published. NOTES: relaxed: what a CTA has read and used cannot
// change any more, and a release would wait for its loads in flight.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where `own`, in this CTA's shared memory, is in that of the cluster's `cta`.
__device__ inline uint32_t address_in_cta(const void* own, int cta) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(cta));
    return address;
}

// A number in the shared memory of the cluster's first CTA, which still runs.
__device__ inline int of_first_cta(const int& own) {
    int value;
    asm volatile("ld.shared::cluster.b32 %0, [%1];\n"
                 : "=r"(value)
                 : "r"(address_in_cta(&own, 0))
                 : "memory");
    return value;
}

// arrive_warp on the barrier of the cluster's `cta`, this one or another. NOTES: of the CTA's scope, since a
// release to the cluster is a MEMBAR.GPU: enough for readers, whose wgmmas are done, not for writers.
__device__ inline void arrive_warp_in_cta(const kittens::semaphore& own, int cta) {
    if (arrives_for_warp())
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(address_in_cta(&own, cta))
                     : "memory");
}

// Starts to copy `bytes` of shared memory to the same place of another CTA, where they count on `arrived`; by
// one thread, 16 bytes aligned.
__device__ inline void send_to_cta(const void* own, uint32_t bytes, const kittens::semaphore& arrived,
                                   int cta) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
            "r"(address_in_cta(own, cta)),
        "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(bytes),
        "r"(address_in_cta(&arrived, cta))
        : "memory");
}

}  // namespace tfla_tk
