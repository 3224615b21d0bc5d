// Log gates of a chunk as pairs of floats, and their sums from the chunk's start.
#pragma once

#include "common/float_pair.cuh"
#include "common/warp.cuh"

namespace tfla_tk {

constexpr double kLog2eDouble = 1.4426950408889634;

// Smaller log gates are clamped to this. Sums over a chunk then stay where one ulp of fp32 is at most about
// 1, so that rounding a row's reference up costs no range.
constexpr float kLeastLogGate = -2e5f;

// log2(e^x), finite also for x = -inf; NaN stays NaN.
__device__ inline FloatPair log2_exp(float x) {
    constexpr FloatPair kLog2e = high_and_low(kLog2eDouble);
    return product(x < kLeastLogGate ? kLeastLogGate : x, kLog2e);
}

// A number for each of a lane's two tokens of a chunk, 2 lane and 2 lane + 1.
struct alignas(16) TwoPairs {
    FloatPair x, y;
};

// Inclusive sums over the chunk's tokens, by one warp.
__device__ inline TwoPairs inclusive_sums(const TwoPairs& x, int lane) {
    const FloatPair second = warp_inclusive_sum(x.x + x.y, lane);
    return {second - x.y, second};
}

}  // namespace tfla_tk
