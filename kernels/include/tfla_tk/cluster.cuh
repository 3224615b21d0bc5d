// CTAs of a cluster: their barrier, and a number that one of them writes into another one's shared memory.
#pragma once

#include <cstdint>

namespace tfla_tk {

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

// Writes `number` to where `place` is in the shared memory of the cluster's `cta`, after all that this thread
// has written or seen written.
__device__ inline void release_to_cta(int* place, int cta, int number) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.release.cluster.shared::cluster.u32 [remote], %2;\n"
        "}\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))),
        "r"(cta), "r"(number)
        : "memory");
}

// What another CTA has written to `place`, of this one's shared memory, by release_to_cta.
__device__ inline int acquire_from_cta(const int* place) {
    int number;
    asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];\n"
                 : "=r"(number)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place)))
                 : "memory");
    return number;
}

}  // namespace tfla_tk
