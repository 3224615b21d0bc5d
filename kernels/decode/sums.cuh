// Sums over the lanes of a warp. Their order depends on nothing but the number of lanes.
#pragma once

#include <cuda_runtime.h>

namespace tfla_tk::decode {

constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline float sum_of_warp(float x) {
#pragma unroll
    for (int step = 16; step >= 1; step /= 2) x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}

// mask ? a : b for a mask of all bits or none. NOTES: one instruction, where the compiler makes branches.
__device__ inline float selected(unsigned mask, float a, float b) {
    return __uint_as_float((__float_as_uint(a) & mask) | (__float_as_uint(b) & ~mask));
}

// Sums N values over the lanes that differ in the bits kTop, kTop / 2, .., kLow. While more than one value is
// left, a step gives half of them away. So a lane returns the sum of one value, whose number are the lane's
// upper log2(N) bits among these.
template <int N, int kTop, int kLow> __device__ inline float sum_by_halving(float (&x)[N], int lane) {
    int step = kTop;
#pragma unroll
    for (int n = N / 2; n >= 1; n /= 2) {
        const unsigned upper = lane & step ? kAllLanes : 0;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float keep = selected(upper, x[i + n], x[i]), give = selected(upper, x[i], x[i + n]);
            x[i] = __fadd_rn(keep, __shfl_xor_sync(kAllLanes, give, step));
        }
        step /= 2;
    }
#pragma unroll
    for (int rest = kTop / N; rest >= kLow; rest /= 2)
        x[0] = __fadd_rn(x[0], __shfl_xor_sync(kAllLanes, x[0], rest));
    return x[0];
}

}  // namespace tfla_tk::decode
