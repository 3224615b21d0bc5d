// Rounding of (V . key_scale)^T, the A operand of the state's update at K = 256.
//
// Error feedback (sigma-delta): the rounding error (exact minus rounded) of token t is added to token t - 8
// before that is rounded. Where their keys are alike, as queries see them, the errors cancel. Without it h
// would be up to a third less accurate than with scaled keys, whose rounding errors average out over a query.
// The error goes backward in time, and never to a token of a much smaller weight, whose key may be larger by
// as much (write_value_scale).
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// Scaling of the values of two tokens: key_scale as a high and a low part, and whether they take the errors
// of the tokens eight later (kTakes, kNot).
template <class T2> struct alignas(16) ValueScale {
    // negative, as `lost` is the negated error: their product is the error that is taken
    static constexpr float kTakes = -1.f, kNot = -0.f;
    T2 high, low, minus_high, take;

    __device__ inline ValueScale(float2 key_scale, float2 take) : take(from_float2<T2>(take)) {
        const HighAndLow<T2> scale(key_scale);
        high = scale.high, low = scale.low, minus_high = __hneg2(scale.high);
    }
    // x of both tokens times key_scale, rounded. lost: negated errors of the tokens eight later; becomes
    // those of these.
    __device__ inline T2 scaled(T2 x, T2& lost) const {
        const T2 rest = __hfma2(lost, take, __hmul2(x, low));
        const T2 rounded = __hfma2(x, high, rest);
        lost = __hsub2(__hfma2(x, minus_high, rounded), rest);
        return rounded;
    }
};

// One chunk's gates as the warpgroups read them.
template <class T2> struct TransposedStage : GateStage {
    ValueScale<T2> value_scale[kChunk / 2];
    float log2_unit;       // after this chunk, where the state follows the weights (state_exponent.cuh)
    bool has_larger_rows;  // whether rows may be scaled up (fp16_row_scaling.cuh)
};

// Scaling of the lane's tokens of 16 k .. 16 k + 15: two of the first eight and two of the others.
template <class T2> struct ValueScales {
    ValueScale<T2> of_eight[2];

    __device__ inline ValueScales(const TransposedStage<T2>& gates, int k)
        : of_eight{gates.value_scale[8 * k + fresh_laneid() % 4],
                   gates.value_scale[8 * k + 4 + fresh_laneid() % 4]} {}
};

// A state warpgroup's (V . key_scale)^T as an A operand.
template <class T2> struct ScaledValues {
    // negated errors of rows lane / 4 and + 8, at the lane's even and odd tokens
    T2 lost[2]{};

    // scaled = a . key_scale, rounded; a: 16 tokens of V^T.
    template <class A> __device__ inline void scale(A& scaled, const A& a, const ValueScales<T2>& scales) {
#pragma unroll
        for (int half = 1; half >= 0; half--)
#pragma unroll
            for (int row = 0; row < 2; row++)
                scaled.tiles[0][0].data[2 * half + row] =
                    scales.of_eight[half].scaled(a.tiles[0][0].data[2 * half + row], lost[row]);
    }
    // The errors decay with the state.
    __device__ inline void decay(float by) {
#pragma unroll
        for (auto& x : lost) x = __hmul2(x, from_float2<T2>({by, by}));
    }
};

}  // namespace tfla_tk::mlstm
