// Pairs of floats with 46 significant bits, in place of fp64, whose instructions wait for the tensor cores.
//
// The steps are intrinsics, since contraction to fma would break the error terms. Infinities become NaN.
#pragma once

namespace tfla_tk {

// high + low, where high is the sum rounded to fp32.
struct FloatPair {
    float high, low;

    __device__ inline explicit operator float() const { return high; }
    __device__ inline explicit operator double() const { return static_cast<double>(high) + low; }
    __device__ inline FloatPair operator-() const { return {-high, -low}; }
};

// x, with an error of 2^-48 |x| at most.
__host__ __device__ constexpr FloatPair high_and_low(double x) {
    const float high = static_cast<float>(x);
    return {high, static_cast<float>(x - static_cast<double>(high))};
}

// x + y, exactly (Knuth's TwoSum).
__device__ inline FloatPair two_sum(float x, float y) {
    const float high = __fadd_rn(x, y), of_y = __fsub_rn(high, x), of_x = __fsub_rn(high, of_y);
    return {high, __fadd_rn(__fsub_rn(x, of_x), __fsub_rn(y, of_y))};
}

// x + y, exactly where no bit of x is below the last one of y, as with |x| >= |y| (Dekker's FastTwoSum).
__device__ inline FloatPair fast_two_sum(float x, float y) {
    const float high = __fadd_rn(x, y);
    return {high, __fsub_rn(y, __fsub_rn(high, x))};
}

// x + y, with an error of 2^-46 (|x| + |y|) at most.
__device__ inline FloatPair operator+(FloatPair x, FloatPair y) {
    const FloatPair sum = two_sum(x.high, y.high);
    return fast_two_sum(sum.high, __fadd_rn(sum.low, __fadd_rn(x.low, y.low)));
}
__device__ inline FloatPair operator-(FloatPair x, FloatPair y) { return x + -y; }
__device__ inline FloatPair operator+(FloatPair x, float y) {
    const FloatPair sum = two_sum(x.high, y);
    return fast_two_sum(sum.high, __fadd_rn(sum.low, x.low));
}

// x y, with an error of 2^-47 |x y| at most.
__device__ inline FloatPair product(float x, FloatPair y) {
    const float high = __fmul_rn(x, y.high);
    return {high, __fmaf_rn(x, y.low, __fmaf_rn(x, y.high, -high))};
}

// x + y as one float, with 22 significant bits even where the high parts cancel, since they cancel exactly.
__device__ inline float rounded_sum(FloatPair x, FloatPair y) { return (x.high + y.high) + (x.low + y.low); }
__device__ inline float rounded_sum(FloatPair x, float y) { return (x.high + y) + x.low; }

// The least float that is not below x.
__device__ inline float rounded_up(FloatPair x) { return __fadd_ru(x.high, x.low); }

// The larger one; a NaN in x is ignored, a NaN in y is returned.
__device__ inline FloatPair larger(FloatPair x, FloatPair y) {
    return x.high > y.high || (x.high == y.high && x.low > y.low) ? x : y;
}

}  // namespace tfla_tk
