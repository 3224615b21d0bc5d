// The walk of KDA's forward.
#pragma once

#include "kda/forward/walker.cuh"
#include "kda/run_walk.cuh"

namespace tfla_tk::kda {

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void kda_forward_kernel(const __grid_constant__ WalkGlobals g) {
    TFLA_DEVICE_CODE { run_walk<ForwardWalker<C>>(g); }
}

}  // namespace tfla_tk::kda
