// What the kernels that walk chunks begin with.
#pragma once

namespace tfla_tk {

// Leaves the task of a block and its barriers in shared memory. prefetch(): starts to bring its tensor maps.
// Whether there is anything to do.
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
