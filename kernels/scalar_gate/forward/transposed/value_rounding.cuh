// What the state of the mLSTM forward at K = 256 is fed with: (V . key_scale)^T, rounded.
//
// What rounding takes from a token's values is given to those of the token eight before, and rounded with
// them: where keys are alike, as far as queries see, the errors cancel. Without it h would be up to a third
// further off than with scaled keys, whose errors a query averages. Backward in time, and not to a token of
// far less weight, whose key may be so much larger (write_value_scale).
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// What the values of two tokens are scaled with, key_scale as a high and a low part, and kTakes or kNot, of
// what those of the tokens eight later have lost.
template <class T2> struct alignas(16) ValueScale {
    // negated, and so is what is lost: their product is what is taken
    static constexpr float kTakes = -1.f, kNot = -0.f;
    T2 high, low, minus_high, take;

    __device__ inline ValueScale(float2 key_scale, float2 take) : take(from_float2<T2>(take)) {
        const HighAndLow<T2> scale(key_scale);
        high = scale.high, low = scale.low, minus_high = __hneg2(scale.high);
    }
    // x of both tokens times key_scale, rounded. lost: of the tokens eight later, then of these.
    __device__ inline T2 scaled(T2 x, T2& lost) const {
        const T2 rest = __hfma2(lost, take, __hmul2(x, low));
        const T2 rounded = __hfma2(x, high, rest);
        lost = __hsub2(__hfma2(x, minus_high, rounded), rest);
        return rounded;
    }
};

// What the GEMM warpgroups read of one chunk.
template <class T2> struct WideStage : GateStage {
    ValueScale<T2> value_scale[kChunk / 2];
    float log2_unit, ahead;  // of the units after it, where the state runs ahead (mlstm_wide_units.cuh)
    bool has_larger_rows;    // where the kernel holds rows larger: some may be (mlstm_wide_rows.cuh)
};

// What the lane's tokens of 16 k .. 16 k + 15 are scaled with: two of the first eight and two of the others.
template <class T2> struct ValueScales {
    ValueScale<T2> of_eight[2];

    __device__ inline ValueScales(const WideStage<T2>& gates, int k)
        : of_eight{gates.value_scale[8 * k + fresh_laneid() % 4],
                   gates.value_scale[8 * k + 4 + fresh_laneid() % 4]} {}
};

// A state warpgroup's (V . key_scale)^T as an A operand.
template <class T2> struct ScaledValues {
    // of rows lane / 4 and + 8, at the lane's even and odd tokens
    T2 lost[2]{};

    // a: of V^T as it is, 16 tokens.
    template <class A> __device__ inline void scale(A& scaled, const A& a, const ValueScales<T2>& scales) {
#pragma unroll
        for (int half = 1; half >= 0; half--)
#pragma unroll
            for (int row = 0; row < 2; row++)
                scaled.tiles[0][0].data[2 * half + row] =
                    scales.of_eight[half].scaled(a.tiles[0][0].data[2 * half + row], lost[row]);
    }
    // With the state.
    __device__ inline void decay(float by) {
#pragma unroll
        for (auto& x : lost) x = __hmul2(x, from_float2<T2>({by, by}));
    }
};

}  // namespace tfla_tk::mlstm
