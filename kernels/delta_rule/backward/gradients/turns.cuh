// Slices of V add up dq and dk in device memory, in fp32. They take turns at each chunk, so that the order of
// the additions is always the same: the first slice stores, and each further one adds when the one before it
// has done so.
#pragma once

#include "delta_rule/backward/gradients/config.cuh"

namespace tfla_tk::delta_rule {

// The number of a CTA, for its first warp. CTAs that wait for each other draw tickets in the order in which
// they begin: each then only waits for one that runs.
__device__ inline int block_of_gradients(const GradientsGlobals& g) {
    if (g.turns == nullptr || threadIdx.x >= 32) return blockIdx.x;
    const int ticket = threadIdx.x == 0 ? atomicAdd(g.turns, 1) : 0;
    return __shfl_sync(0xffffffff, ticket, 0);
}

// How many warps have added what they have of a chunk: kKeysWarps of each slice.
__device__ inline int* turn_of(const GradientsGlobals& g, const GradientsTask& task, int chunk) {
    return g.turns + 1 + task.batch_head * g.slots + task.first_slot + chunk;
}

// Waits until the slices before this one have added theirs, by one warp.
__device__ inline void await_turn(const GradientsGlobals& g, const GradientsTask& task, int chunk) {
    if (task.slice == 0 || !task.owns(chunk)) return;
    const int* const turn = turn_of(g, task, chunk);
    wait_for_cta(32, [&] { return peek_from_device(turn) == kKeysWarps * task.slice; });
    acquire_from_device(turn);
}

// Tells the next slice that this warp has added what it has.
__device__ inline void end_turn(const GradientsGlobals& g, const GradientsTask& task, int chunk) {
    if (g.slices == 1 || !task.owns(chunk)) return;
    __syncwarp();
    if (fresh_laneid() == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(turn_of(g, task, chunk)), "r"(1)
                     : "memory");
}

__device__ inline void add_four(float* to, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

}  // namespace tfla_tk::delta_rule
