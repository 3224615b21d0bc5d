// What the state of the mLSTM forward at K = 256 is fed with: (V . key_scale)^T, rounded.
//
// What rounding takes from a token's values is given to those of the token eight before, and rounded with
// them: where keys are alike, as far as queries see, the errors cancel. Without it h would be up to a third
// further off than with scaled keys, whose errors a query averages. Backward in time, and not to a token of
// far less weight, whose key may be so much larger (write_value_scale).
#pragma once

#include "mlstm_fwd_globals.cuh"
#include "tfla_tk/sync.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk::mlstm {

// PairScale and FloatScale: what the values of two tokens are scaled with, key_scale, and kTakes or kNot, of
// what those of the tokens eight later have lost.
//
// scaled(): x of both tokens times that, rounded. lost: of the tokens eight later, then of these. decay(): of
// what was lost, with the state.

// By pairs: key_scale is a high and a low part.
template <class T2> struct alignas(16) PairScale {
    using Lost = T2;  // negated, and so is `take`: their product is what is taken
    static constexpr float kTakes = -1.f, kNot = -0.f;
    T2 high, low, minus_high, take;

    __device__ inline static PairScale of(float2 key_scale, float2 take) {
        const T2 taken = from_float2<T2>(take);
        const HighAndLow<T2> scale(key_scale);
        return {scale.high, scale.low, __hneg2(scale.high), taken};
    }
    __device__ inline T2 scaled(T2 x, Lost& lost) const {
        const T2 rest = __hfma2(lost, take, __hmul2(x, low));
        const T2 rounded = __hfma2(x, high, rest);
        lost = __hsub2(__hfma2(x, minus_high, rounded), rest);
        return rounded;
    }
    __device__ inline static void decay(Lost& lost, float by) {
        lost = __hmul2(lost, from_float2<T2>({by, by}));
    }
};

// In fp32, where weights may be as small as those of a sigmoid gate that is nearly closed: below 2^-14 they,
// and what is lost of their values, have few digits in fp16.
template <class T2> struct alignas(16) FloatScale {
    using Lost = float2;
    static constexpr float kTakes = 1.f, kNot = 0.f;
    float2 key_scale, take;

    __device__ inline static FloatScale of(float2 key_scale, float2 take) { return {key_scale, take}; }
    __device__ inline T2 scaled(T2 x, Lost& lost) const {
        const float2 v = to_float2(x);
        const float2 exact{v.x * key_scale.x + take.x * lost.x, v.y * key_scale.y + take.y * lost.y};
        const T2 rounded = from_float2<T2>(exact);
        const float2 kept = to_float2(rounded);
        lost = {exact.x - kept.x, exact.y - kept.y};
        return rounded;
    }
    __device__ inline static void decay(Lost& lost, float by) { lost = {lost.x * by, lost.y * by}; }
};

// What the GEMM warpgroups read of one chunk.
template <class Scale> struct WideStage : GateStage {
    Scale value_scale[kChunk / 2];
};

// A state warpgroup's (V . key_scale)^T as an A operand.
template <class Scale> struct ScaledValues {
    // of rows lane / 4 and + 8, at the lane's even and odd tokens
    typename Scale::Lost lost[2]{};

    // a: of V^T as it is, the 16 tokens from 16 k on.
    template <class A>
    __device__ inline void scale(A& scaled, const A& a, const WideStage<Scale>& gates, int k) {
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            asm volatile("" ::: "memory");  // NOTES: factors are loaded when needed: registers
            const Scale scale = gates.value_scale[8 * k + 4 * half + fresh_laneid() % 4];
#pragma unroll
            for (int row = 0; row < 2; row++)
                scaled.tiles[0][0].data[2 * half + row] =
                    scale.scaled(a.tiles[0][0].data[2 * half + row], lost[row]);
        }
    }
    // With the state.
    __device__ inline void decay(float by) {
#pragma unroll
        for (auto& x : lost) Scale::decay(x, by);
    }
};

}  // namespace tfla_tk::mlstm
