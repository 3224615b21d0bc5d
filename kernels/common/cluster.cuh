// Clusters: the cluster barrier, and writes to the shared memory of another CTA.
#pragma once

#include <cstdint>

#include "common/sync.cuh"

namespace tfla_tk {

// Number of CTAs in this cluster and this CTA's rank; 1 and 0 without clusters.
// NOTES: reread at every call, to save registers.
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

// Barrier over all threads of the cluster.
__device__ inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::
            : "memory");
}

// The same in two halves, for callers that publish nothing. NOTES: relaxed is enough to say that reads are
// done, since their results have been used; a release would wait for the loads in flight.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The address, in the shared memory of CTA `cta`, that corresponds to `own` in this CTA.
__device__ inline uint32_t address_in_cta(const void* own, int cta) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(cta));
    return address;
}

// Reads `own` from the shared memory of the cluster's first CTA, which must still run.
__device__ inline int of_first_cta(const int& own) {
    int value;
    asm volatile("ld.shared::cluster.b32 %0, [%1];\n"
                 : "=r"(value)
                 : "r"(address_in_cta(&own, 0))
                 : "memory");
    return value;
}

// Arrives on the barrier of CTA `cta`, which may be this one. By one thread.
__device__ inline void arrive_in_cta(const kittens::semaphore& own, int cta) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(address_in_cta(&own, cta))
                 : "memory");
}

// arrive_warp on the barrier of CTA `cta`, which may be this one. NOTES: the release has CTA scope, since one
// of cluster scope costs a MEMBAR.GPU. That suffices for readers, whose wgmmas are done or who have used what
// they have loaded, but not for writers.
__device__ inline void arrive_warp_in_cta(const kittens::semaphore& own, int cta) {
    if (arrives_for_warp()) arrive_in_cta(own, cta);
}

// Arrives on the barrier of CTA `cta`, which then expects `bytes` of asynchronous copies. By one thread.
__device__ inline void expect_in_cta(const kittens::semaphore& own, uint32_t bytes, int cta) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;\n" ::"r"(address_in_cta(&own, cta)),
        "r"(bytes)
        : "memory");
}

// Starts a copy of `bytes` of shared memory to the address in another CTA that corresponds to `to` in this
// one. They complete `arrived` there. Called by one thread; 16-byte aligned.
__device__ inline void send_to_cta(const void* own, const void* to, uint32_t bytes,
                                   const kittens::semaphore& arrived, int cta) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
            "r"(address_in_cta(to, cta)),
        "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(bytes),
        "r"(address_in_cta(&arrived, cta))
        : "memory");
}

// The same to the same address.
__device__ inline void send_to_cta(const void* own, uint32_t bytes, const kittens::semaphore& arrived,
                                   int cta) {
    send_to_cta(own, own, bytes, arrived, cta);
}

}  // namespace tfla_tk
