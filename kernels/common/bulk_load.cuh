// Bulk copies of memory without a tensor map.
#pragma once

#include "common/tiles.cuh"

namespace tfla_tk {

// Starts a copy to shared memory; its bytes complete `arrived`. 16-byte aligned.
__device__ inline void load_bulk(void* to, const void* from, uint32_t bytes, kittens::semaphore& arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&arrived))
        : "memory");
}

}  // namespace tfla_tk
