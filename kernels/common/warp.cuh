// Sums and maxima over the lanes of a warp, of floats and of pairs of floats.
#pragma once

#include "common/float_pair.cuh"
#include "common/sync.cuh"
#include "kittens.cuh"

namespace tfla_tk {

template <class X> __device__ inline X warp_inclusive_sum(X x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const X other = __shfl_up_sync(0xffffffff, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// All addends have the same sign. The rounding errors of the high parts add up in the low parts, off the
// critical path until the end.
__device__ inline FloatPair warp_inclusive_sum(FloatPair x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float high = __shfl_up_sync(0xffffffff, x.high, step);
        const float low = __shfl_up_sync(0xffffffff, x.low, step);
        const FloatPair sum = two_sum(x.high, high);
        if (lane >= step) x = {sum.high, __fadd_rn(__fadd_rn(x.low, low), sum.low)};
    }
    return fast_two_sum(x.high, x.low);
}

__device__ inline float warp_inclusive_max(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_up_sync(0xffffffff, x, step));
    return x;
}

// fmax without NaN handling, which costs registers.
__device__ inline double larger(double x, double y) { return x > y ? x : y; }

// Maps a float's bits to an integer of the same order, NaN above all. The function is its own inverse.
__device__ inline int sortable(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// Maximum over all lanes' x and y; NaN if any of them is NaN.
__device__ inline float warp_max(float x, float y) {
    const int own = max(sortable(__float_as_int(x)), sortable(__float_as_int(y)));
    return __int_as_float(sortable(__reduce_max_sync(0xffffffff, own)));
}
__device__ inline float warp_max(float x) { return warp_max(x, x); }
__device__ inline FloatPair warp_max(FloatPair x, FloatPair y) {
    const float high = warp_max(x.high, y.high);
    auto low = [&](FloatPair x) { return x.high == high ? x.low : -INFINITY; };
    return {high, warp_max(fmaxf(low(x), low(y)))};
}

template <class X> __device__ inline X warp_sum(X x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

__device__ inline FloatPair warp_sum(FloatPair x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float high = __shfl_xor_sync(0xffffffff, x.high, step);
        const float low = __shfl_xor_sync(0xffffffff, x.low, step);
        x = x + FloatPair{high, low};
    }
    return x;
}

__device__ inline FloatPair of_lane(FloatPair x, int lane) {
    return {__shfl_sync(0xffffffff, x.high, lane), __shfl_sync(0xffffffff, x.low, lane)};
}
__device__ inline FloatPair of_last_lane(FloatPair x) { return of_lane(x, 31); }

}  // namespace tfla_tk
