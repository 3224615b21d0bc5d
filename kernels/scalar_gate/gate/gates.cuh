// The gates of the chunkwise form, scanned ahead of the GEMMs: by one warp up to K = 128, by two warps in a
// pipeline at K = 256.
//
// Notation of the TFLA papers, in log2 units: b_t = cumsum(log f) in the chunk, a_j = log i_j - b_j,
// M_t = max(m_in, max_{j <= t} a_j), m_t = b_t + M_t. Sums are pairs of floats, so that gates of +-1e4 cancel
// to 1e-8; fp64 instructions would wait for the tensor cores. The GEMM warpgroups read a_j as a pair and M_t
// as a float.
#pragma once

#include "common/float_pair.cuh"
#include "common/sync.cuh"
#include "common/warp.cuh"
#include "kittens.cuh"
#include "scalar_gate/gate/policy.cuh"
#include "sequence/cut.h"
#include "sequence/gate_loads.cuh"

namespace tfla_tk {

constexpr double kLn2 = 0.6931471805599453;

// One chunk's gates as the GEMM warpgroups and the warp of n read them.
// P_tj = S_tj 2^{(column_j.x - row_t) + column_j.y}, with S = Q K^T unscaled.
struct alignas(16) GateStage {
    float2 column[kChunk];  // a_j + log2(scale) as high and low part
    float row[kChunk];      // M_t rounded up to fp32, which is the stabiliser used for row t
    float inter[kChunk];    // factor on q C_in: scale 2^{m_in - row_t} times the deferred decay of C_in
    // with m_t = row_t + b_t. Stabilised gates: 2^{-m_t}, the lower bound of |q n|. Others: 2^{m_t}, a factor
    // on the row's output
    float unit[kChunk];
    // factor on k_j in the state: 2^{a_j - M_L} (stabilised) or 2^{a_j + b_L}, over the deferred decay
    float key_scale[kChunk];
    float decay;  // factor on the state; 1 where its decay is deferred
};

// An element of P from its score and from GateStage::column and GateStage::row; 0 where not `visible`
// (causal). kInPlace: compute it unconditionally in the score's register. NOTES: the plain form computes
// visible elements only and is faster, but takes a second register per score.
template <bool kInPlace = false>
__device__ inline float gated(float score, float high, float low, float row, bool visible) {
    if constexpr (!kInPlace) return visible ? score * exp2f((high - row) + low) : 0.f;
    float p = score * exp2f((high - row) + low);
    asm("{\n"
        ".reg .pred visible;\n"
        "setp.ne.s32 visible, %1, 0;\n"
        "selp.f32 %0, %0, 0f00000000, visible;\n"
        "}\n"
        : "+f"(p)
        : "r"(static_cast<int>(visible)));
    return p;
}

// 2^x is 0 in fp32 for x <= kNothing.
constexpr float kNothing = -150.f;

// 2^x, rounded to 0 below 2^-150.
__device__ inline float exp2_of(double x) { return exp2f(static_cast<float>(x)); }

// w of a row: max(|d|, floor) + eps. A NaN in d (n beyond the range of fp16) is kept; fmaxf would drop it.
__device__ inline float row_normaliser(float d, float floor, float eps) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(d)), "f"(floor));
    return larger + eps;
}

// Writes the lane's two tokens in the format of GateStage::column.
__device__ inline void write_pairs(float2* to, FloatPair x, FloatPair y) {
    *reinterpret_cast<float4*>(to) = {x.high, x.low, y.high, y.low};
}

// M_t of the lane's two tokens, rounded up to fp32.
__device__ inline float2 rounded_up_maxima(FloatPair a_x, FloatPair a_y, FloatPair m_in, int lane) {
    const float up_x = fmaxf(rounded_up(a_x), rounded_up(m_in));
    const float up_y = fmaxf(rounded_up(a_y), up_x);
    const float row_y = warp_inclusive_max(up_y);
    const float before = __shfl_up_sync(0xffffffff, row_y, 1);
    return {lane == 0 ? up_x : fmaxf(before, up_x), row_y};
}

// A stored stabiliser in log2 units as a pair; an empty state's -inf becomes -1e30.
// NOTES: a cast would add a comparison in fp64, to flush subnormals.
__device__ inline FloatPair finite_stabiliser(double m) {
    constexpr float kLeast = -1e30f;
    auto rounded = [](double x) {
        float y;
        asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
        return y;
    };
    const float high = rounded(m), low = rounded(m - static_cast<double>(high));
    return high < kLeast ? FloatPair{kLeast} : FloatPair{high, low};
}

// Stores and loads m at a chunk's start, which the forward saves for the backward. NOTES: pairs, since
// conversions to fp64 wait for the tensor cores.
__device__ inline void store_chunk_m(float* chunk_m, int64_t at, FloatPair m) {
    reinterpret_cast<float2*>(chunk_m)[at] = {m.high, m.low};
}
__device__ inline FloatPair load_chunk_m(const float* chunk_m, int64_t at) {
    const float2 m = reinterpret_cast<const float2*>(chunk_m)[at];
    return {m.x, m.y};
}

// log2 of the forget gates, from what is stored.
template <class P> __device__ inline TwoPairs log2_forget(float2 f) {
    return {P::log2_forget(f.x), P::log2_forget(f.y)};
}

// a = log2 i - b. i: as stored.
template <class P> __device__ inline TwoPairs input_over_forget(float2 i, const TwoPairs& b) {
    return {P::log2_input(i.x) - b.x, P::log2_input(i.y) - b.y};
}

// Deferred decay. A state in registers need not be multiplied by every chunk's decay: readers of the state
// are scaled by the product of the deferred decays, what is added to it by the inverse, and the whole state
// is multiplied only when that product falls below 2^-kLargestDebt. fp16 has no range for a debt.
template <class T> constexpr float kLargestDebt = std::is_same_v<T, kittens::bf16> ? 32.f : 0.f;

template <class T> struct DeferredDecay {
    static constexpr bool kFollowsWeights = false;
    float log2 = 0.f;

    DeferredDecay() = default;
    __device__ inline explicit DeferredDecay(bool) {}  // same arguments as FollowedWeights

    // Adds a chunk's decay, log2. Returns the factor on the state: 1 while the decay is deferred. settle:
    // defer nothing beyond this chunk. NOTES: slow decays are deferred less, since at a large log2 every
    // small decay would be rounded in the same direction.
    __device__ inline float add(float decay, bool settle) {
        log2 += decay;
        const float most = decay > -1.f ? fminf(kLargestDebt<T>, 4.f) : kLargestDebt<T>;
        if (!settle && log2 >= -most) return 1.f;
        const float due = exp2f(log2);
        log2 = 0.f;
        return due;
    }
};

// Scans the chunks of one head, by one warp; lane l has tokens 2 l and 2 l + 1 of a chunk. Owed: the policy
// of the state's scale (DeferredDecay, FollowedWeights). Its log2 ends at 0, unless it follows the weights.
template <class T, class P, class Owed = DeferredDecay<T>> struct GateScan {
    FloatPair m;  // stabiliser at the chunk's start, log2 units; stays 0 with gates that are not stabilised
    Owed owed{};

    // i, f: gates of the lane's two tokens as stored. They are replaced by next_i() and next_f() as soon as
    // they have been read, so that the next loads are in flight during the scan. last: of the walk. Returns
    // the tokens' m_t in natural log units.
    template <class NextI, class NextF>
    __device__ inline float2 chunk(GateStage& out, float2& i, float2& f, float scale, FloatPair log2_scale,
                                   bool last, NextI next_i, NextF next_f) {
        const int lane = fresh_laneid();
        const TwoPairs log_f = log2_forget<P>(f);
        f = next_f();
        const TwoPairs b = inclusive_sums(log_f, lane);
        const float2 taken_i = i;
        i = next_i();
        const TwoPairs a = input_over_forget<P>(taken_i, b);
        return finish(out, b, a, scale, log2_scale, last);
    }

    // The part of chunk() that depends on earlier chunks. b, a: of the lane's two tokens.
    __device__ inline float2 finish(GateStage& out, const TwoPairs& b, const TwoPairs& a, float scale,
                                    FloatPair log2_scale, bool last) {
        const int lane = fresh_laneid();
        auto write_pair = [&](float (&values)[kChunk], float x, float y) {
            *reinterpret_cast<float2*>(&values[2 * lane]) = {x, y};
        };
        write_pairs(&out.column[2 * lane], a.x + log2_scale, a.y + log2_scale);
        const auto [row_x, row_y] = rounded_up_maxima(a.x, a.y, m, lane);
        const auto m_x = static_cast<float>(b.x + row_x), m_y = static_cast<float>(b.y + row_y);
        write_pair(out.row, row_x, row_y);
        auto inter = [&](float row) { return scale * exp2f(rounded_sum(m, -row) + owed.log2); };
        write_pair(out.inter, inter(row_x), inter(row_y));
        write_pair(out.unit, exp2f(P::kStabilised ? -m_x : m_x), exp2f(P::kStabilised ? -m_y : m_y));
        // factors on the state and on what is added to it are relative to the chunk's end
        const FloatPair b_end = of_last_lane(b.y);
        const FloatPair a_max = !P::kStabilised && !Owed::kFollowsWeights ? FloatPair{} : warp_max(a.x, a.y);
        const FloatPair m_max = P::kStabilised ? larger(m, a_max) : FloatPair{};
        const FloatPair end = P::kStabilised ? -m_max : b_end;
        float decay = rounded_sum(m, end);
        if constexpr (Owed::kFollowsWeights)
            decay = owed.add(decay, rounded_sum(a_max, end));
        else
            decay = owed.add(decay, last);
        if (lane == 0) out.decay = decay;
        auto key_scale = [&](FloatPair a) { return exp2f(rounded_sum(a, end) - owed.log2); };
        write_pair(out.key_scale, key_scale(a.x), key_scale(a.y));
        if constexpr (P::kStabilised) m = b_end + m_max;
        constexpr auto kNaturalLog = static_cast<float>(kLn2);
        return {m_x * kNaturalLog, m_y * kNaturalLog};
    }
};

}  // namespace tfla_tk
