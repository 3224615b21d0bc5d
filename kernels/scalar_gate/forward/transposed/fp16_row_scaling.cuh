// Rows of h at K = 256 whose factor is too small for fp16.
//
// P is divided by the normaliser before it is rounded. Where gates are nearly closed that makes it so small
// that fp16 has few digits left, or none. So there P and what is read of the state are held larger by a power
// of two, and so is h, until the state's warps have it in shared memory. (A large w beside open gates is a
// sum of large P, which needs none of this.)
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

constexpr float kLeastFactor = 1.f / 512;  // a row whose factor may be less is held larger

__device__ inline float over_power_of_two(float power) {
    return __int_as_float(0x7f000000 - __float_as_int(power));
}

// By how much a row is held larger, at least 1, a power of two. unit: GateStage::unit, so that all who need
// it come to the same: the row's factor is at most the unit with the sigmoid gate and at most one over it
// with the exponential one.
__device__ inline float held_larger(float unit, bool sigmoid) {
    constexpr float kMost = 1 << 24;  // what is smaller than 1 / kMost is no fp16
    const float power = __int_as_float(__float_as_int(unit) & 0x7f800000);
    const float over_factor = sigmoid ? over_power_of_two(power) : power;
    return fminf(fmaxf(over_factor * kLeastFactor, 1.f), kMost);
}

// Whether it may be more than 1, of a row with the stabiliser m in natural units: below ln kLeastFactor.
__device__ inline bool may_be_held_larger(float m) { return m < -6.2f; }

// This warp's 16 columns of h in shared memory over what their rows are held larger by. address: the panel
// plus transposed_lane_offset, as store_transposed had it.
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
