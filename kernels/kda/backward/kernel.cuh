// The mirror of KDA's forward: a walk from the last chunk to the first. It leaves R' and dS' of every chunk
// for the kernel of the gradients.
#pragma once

#include "kda/backward/walker.cuh"
#include "kda/run_walk.cuh"

namespace tfla_tk::kda {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void kda_mirror_kernel(const __grid_constant__ WalkGlobals g) {
    TFLA_DEVICE_CODE { run_walk<MirrorWalker<C>>(g); }
}

}  // namespace tfla_tk::kda
