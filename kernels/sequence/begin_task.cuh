// Prologue of every kernel that walks chunks.
#pragma once

namespace tfla_tk {

// Writes the block's task to shared memory, initialises the barriers and calls prefetch(), which prefetches
// the tensor maps. Returns whether the block has work to do.
template <class C, class Globals, class Memory, class Prefetch>
__device__ inline bool begin_task(const Globals& g, Memory& smem, int block, Prefetch prefetch) {
    if (threadIdx.x < 32) {
        const auto task = decltype(smem.task)::template of_block<C>(g, block);
        if (threadIdx.x == 0) {
            smem.task = task;
            smem.init_barriers();
            prefetch();
        }
    }
    __syncthreads();
    return smem.task.tokens >= 0;
}

}  // namespace tfla_tk
