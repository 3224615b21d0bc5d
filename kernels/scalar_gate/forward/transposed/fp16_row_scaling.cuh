// Scaling of rows whose factor is too small for fp16, at K = 256.
//
// P is divided by the normaliser before it is rounded. Where gates are nearly closed that leaves few digits
// in fp16, or none. Such rows of P and of read_factors are scaled up by a power of two, and h is divided by
// it in shared memory. (A large w beside open gates is a sum of large P and needs no scaling.)
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// Rows whose factor may fall below this are scaled up before rounding to fp16.
constexpr float kLeastFactor = 1.f / 512;

__device__ inline float over_power_of_two(float power) {
    return __int_as_float(0x7f000000 - __float_as_int(power));
}

// The power of two, at least 1, by which a row is scaled up. It follows from GateStage::unit alone, so that
// all roles compute the same: the row's factor is at most the unit with the sigmoid gate, at most 1 / unit
// with the exponential one.
__device__ inline float held_larger(float unit, bool sigmoid) {
    constexpr float kMost = 1 << 24;  // smaller than 1 / kMost is 0 in fp16
    const float power = __int_as_float(__float_as_int(unit) & 0x7f800000);
    const float over_factor = sigmoid ? over_power_of_two(power) : power;
    return fminf(fmaxf(over_factor * kLeastFactor, 1.f), kMost);
}

// Whether it may exceed 1 for a row with stabiliser m in natural log units: m < ln kLeastFactor.
__device__ inline bool may_be_held_larger(float m) { return m < -6.2f; }

// Divides this warp's 16 columns of h in shared memory by the factors of their rows. address: the panel plus
// transposed_lane_offset, as in store_transposed.
__device__ inline void multiply_back(uint32_t address, const GateStage& gates, bool sigmoid) {
    constexpr int kSteps = kChunk / 16, kStepBytes = 16 * kPanelColumns * sizeof(half);
    const int row = transposed_row(fresh_laneid());
    half_2 back[kSteps], h[kSteps][4];  // eight columns of a row each
#pragma unroll
    for (int k = 0; k < kSteps; k++) load_shared(h[k], address + k * kStepBytes);
#pragma unroll
    for (int k = 0; k < kSteps; k++)
        back[k] = __float2half2_rn(over_power_of_two(held_larger(gates.unit[row + 16 * k], sigmoid)));
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
#pragma unroll
        for (auto& pair : h[k]) pair = __hmul2(pair, back[k]);
        store_shared(address + k * kStepBytes, h[k]);
    }
}

}  // namespace tfla_tk::mlstm
