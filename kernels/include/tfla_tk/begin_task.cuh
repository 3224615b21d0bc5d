// What the kernels that walk chunks begin with.
#pragma once

namespace tfla_tk {

// Leaves a CTA's task and its barriers in shared memory. prefetch(): starts to bring its tensor maps. Whether
// there is anything to do.
template <class C, class Globals, class Memory, class Prefetch>
__device__ inline bool begin_task(const Globals& g, Memory& smem, Prefetch prefetch) {
    if (threadIdx.x < 32) {
        const auto task = decltype(smem.task)::template of_block<C>(g, blockIdx.x);
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
