// A few tokens of a linear recurrence: the state is read once and written once.
//
//     1  load q, k, the gates and v; they lie in the L2 or are small
//     2  load the state, 64 to 96 kB in flight per multiprocessor
//     3  while it comes: norms, decays, writing strengths, to shared memory
//     4  per token: S^T k and S^T q in one reduction, u, the new state in registers, o
//     5  store the state
//
// CTAs: slices of V (a CTA may take several, one after the other), heads of v, batch entries.
#pragma once

#include "common/kernel.cuh"
#include "decode/k_first.cuh"
#include "decode/v_first.cuh"

namespace tfla_tk::decode {

struct Globals {
    DecodeParams p;
    int passes;
};

// A turn takes up to C::kTokens tokens.
template <class C>
__global__ __launch_bounds__(C::kThreads, C::kCtas) void decode_kernel(const __grid_constant__ Globals g) {
    TFLA_DEVICE_CODE {
        using Turn = std::conditional_t<C::kLayout == Layout::v_first, VFirst<C>, KFirst<C>>;
        __shared__ typename Turn::Memory memory;
#pragma unroll 1
        for (int start = 0;; start += C::kTokens) {
            Turn turn(g.p, memory, g.passes, start);
            turn.run();
            if (turn.is_last()) return;
            __syncthreads();
        }
    }
}

}  // namespace tfla_tk::decode
