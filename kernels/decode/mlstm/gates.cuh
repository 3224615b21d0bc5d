// What one token and several have in common: the stored stabiliser, and the normaliser.
#pragma once

#include "common/warp.cuh"
#include "decode/mlstm/numbers.cuh"
#include "scalar_gate/gate/policy.cuh"

namespace tfla_tk::decode {

constexpr double kLogOf2 = 0.6931471805599453;

// 2^x. Differences of log gates are fp64, so that gates of +-1e4 cancel.
__device__ inline float power_of_two(double x) { return exp2f(static_cast<float>(x)); }

// A stabiliser rounded to the dtype in which it is stored. In 16 bits it is at least kLeast: C and n are
// rescaled by its rounding error, which would otherwise exceed the range of fp32.
__device__ inline float stored_stabiliser(DType dtype, float m) {
    constexpr float kLeast = -16384.f;
    const float x = m < kLeast ? kLeast : m;  // NaN stays
    switch (dtype) {
        case DType::bfloat16:
            return widened(narrowed<__nv_bfloat16>(x));
        case DType::float16:
            return widened(narrowed<__half>(x));
        default:
            return m;
    }
}

// max(|d|, floor) + eps. A NaN of d stays; fmaxf would drop it.
__device__ inline float normaliser(float d, float floor, float eps) {
#ifdef __CUDA_ARCH__
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(d)), "f"(floor));
#else
    const float larger = fabsf(d) < floor ? floor : fabsf(d);
#endif
    return larger + eps;
}

}  // namespace tfla_tk::decode
