// The gate side of mLSTM: three numbers per token, scanned by one warp ahead of the GEMMs.
//
// Notation of the TFLA papers, in log2 units: b_t = cumsum(log f) in the chunk, a_j = log i_j - b_j,
// M_t = max(m_in, max_{j <= t} a_j), m_t = b_t + M_t. Sums run in fp64, so that gates of +-1e4 cancel
// exactly; the GEMM side sees fp32 pairs and differences.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kittens.cuh"
#include "tfla_tk/params.h"
#include "tfla_tk/sync.cuh"

namespace tfla_tk {

constexpr int kChunk = 64;  // tokens per chunk (L)
constexpr double kLog2eDouble = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

// What the GEMM warpgroups read of one chunk. P_tj = S_tj 2^{(column_j.x - row_t) + column_j.y}, S unscaled.
struct alignas(16) GateStage {
    float2 column[kChunk];    // a_j + log2(scale) as high and low part
    float row[kChunk];        // M_t rounded up to fp32: the stabiliser that the row really uses
    float inter[kChunk];      // scale 2^{m_in - row_t}, of q C_in
    float post[kChunk];       // 1 (exponential) or 2^{row_t + b_t} (sigmoid), of the row's output
    float floor[kChunk];      // e^{-m_t} (exponential) or 1 (sigmoid): lower bound of |q n|
    float key_scale[kChunk];  // 2^{a_j - M_L} (exponential) or 2^{a_j + b_L} (sigmoid), of k_j in the state
    float decay;              // of the state
};

// A score of the chunk's P, from GateStage::column and GateStage::row.
__device__ inline float gated(float score, float high, float low, float row, bool visible) {
    return visible ? score * exp2f((high - row) + low) : 0.f;
}

__device__ inline float load_gate(const Gate& gate, int64_t offset) {
    switch (gate.dtype) {
        case DType::bfloat16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(gate.data)[offset]);
        case DType::float16:
            return __half2float(static_cast<const __half*>(gate.data)[offset]);
        default:
            return static_cast<const float*>(gate.data)[offset];
    }
}

// The gates of one (batch, head) from a row on.
struct GateRows {
    const Gate& gate;
    int64_t offset;

    __device__ inline GateRows(const Gate& gate, int batch, int head, int row)
        : gate(gate), offset(batch * gate.batch_stride + head * gate.head_stride + row * gate.row_stride) {}

    __device__ inline float operator[](int t) const { return load_gate(gate, offset + t * gate.row_stride); }

    // This lane's two tokens of a chunk; `none` past `tokens`.
    __device__ inline float2 pair(int chunk, int tokens, float none) const {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        return {t < tokens ? (*this)[t] : none, t + 1 < tokens ? (*this)[t + 1] : none};
    }
};

// Pre-activations of a token that is not there: it adds nothing and forgets nothing.
constexpr float kNoInput = -INFINITY, kNoForget = INFINITY;

// Gates below this count as it: sums over a chunk then stay where fp32 still resolves about 1, so that
// rounding a row's reference up costs no range.
constexpr float kLeastLogGate = -2e5f;

// log2(e^x), finite also for x = -inf; NaN stays NaN.
__device__ inline double log2_exp(float x) {
    return static_cast<double>(x < kLeastLogGate ? kLeastLogGate : x) * kLog2eDouble;
}

// log2(1 + e) for 0 <= e <= 1, relative error 2e-7 (a minimax polynomial of log2(1 + e) / e).
__device__ inline float log2_1p(float e) {
    float p = 0.00754808820784f;
    p = p * e - 0.0425626747310f;
    p = p * e + 0.112849049270f;
    p = p * e - 0.197112902999f;
    p = p * e + 0.275638550520f;
    p = p * e - 0.358407735825f;
    p = p * e + 0.480692863464f;
    p = p * e - 0.721340179443f;
    p = p * e + 1.44269502163f;
    return p * e;
}

// log2(sigmoid(x)).
__device__ inline double log2_sigmoid(float x) {
    return log2_exp(fminf(x, 0.f)) - static_cast<double>(log2_1p(__expf(-fabsf(x))));
}

// log2 of the input gate.
template <bool kSigmoid> __device__ inline double log2_input(float x) {
    return kSigmoid ? log2_sigmoid(x) : log2_exp(x);
}

// 2^x, rounded to 0 below 2^-150.
__device__ inline float exp2_of(double x) { return exp2f(static_cast<float>(x)); }

template <class X> __device__ inline X warp_inclusive_sum(X x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const X other = __shfl_up_sync(0xffffffff, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

__device__ inline float warp_inclusive_max(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_up_sync(0xffffffff, x, step));
    return x;
}

// fmax without its care for NaN, which costs registers.
__device__ inline double larger(double x, double y) { return x > y ? x : y; }

// The larger of two floats, without care for NaN.
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }

template <class X> __device__ inline X warp_max(X x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

template <class X> __device__ inline X warp_sum(X x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

// M_t of the lane's two tokens, rounded up to fp32.
__device__ inline float2 rounded_up_maxima(double a_x, double a_y, double m_in, int lane) {
    const float up_x = fmaxf(__double2float_ru(a_x), __double2float_ru(m_in));
    const float up_y = fmaxf(__double2float_ru(a_y), up_x);
    const float row_y = warp_inclusive_max(up_y);
    const float before = __shfl_up_sync(0xffffffff, row_y, 1);
    return {lane == 0 ? up_x : fmaxf(before, up_x), row_y};
}

// Walks the chunks of one head, by one warp: lane l owns tokens 2 l and 2 l + 1 of a chunk.
template <bool kSigmoid> struct GateScan {
    double m;  // stabiliser at the chunk's start, log2 units; stays 0 with the sigmoid gate

    // i, f: pre-activations of the lane's two tokens, replaced by next_i(), next_f() as soon as they are
    // read, so that loads there are in flight over the scan. Returns the tokens' m_t.
    template <class NextI, class NextF>
    __device__ inline float2 chunk(GateStage& out, float2& i, float2& f, float scale, double log2_scale,
                                   NextI next_i, NextF next_f) {
        const int lane = fresh_laneid();
        const double log_f_x = log2_sigmoid(f.x), log_f_y = log2_sigmoid(f.y);
        f = next_f();
        const double b_y = warp_inclusive_sum(log_f_x + log_f_y, lane), b_x = b_y - log_f_y;
        const double b_end = __shfl_sync(0xffffffff, b_y, 31);
        const double a_x = log2_input<kSigmoid>(i.x) - b_x, a_y = log2_input<kSigmoid>(i.y) - b_y;
        i = next_i();

        auto write_pair = [&](float (&values)[kChunk], float x, float y) {
            *reinterpret_cast<float2*>(&values[2 * lane]) = {x, y};
        };
        const double column_x = a_x + log2_scale, column_y = a_y + log2_scale;
        const float high_x = static_cast<float>(column_x), high_y = static_cast<float>(column_y);
        *reinterpret_cast<float4*>(&out.column[2 * lane]) = {
            high_x, static_cast<float>(column_x - static_cast<double>(high_x)), high_y,
            static_cast<float>(column_y - static_cast<double>(high_y))};
        const auto [row_x, row_y] = rounded_up_maxima(a_x, a_y, m, lane);
        const double m_x = b_x + static_cast<double>(row_x), m_y = b_y + static_cast<double>(row_y);
        write_pair(out.row, row_x, row_y);
        write_pair(out.inter, scale * exp2_of(m - static_cast<double>(row_x)),
                   scale * exp2_of(m - static_cast<double>(row_y)));
        write_pair(out.post, kSigmoid ? exp2_of(m_x) : 1.f, kSigmoid ? exp2_of(m_y) : 1.f);
        write_pair(out.floor, kSigmoid ? 1.f : exp2_of(-m_x), kSigmoid ? 1.f : exp2_of(-m_y));
        // The state's gates are relative to the chunk's end.
        const double m_max = kSigmoid ? 0. : larger(m, warp_max(larger(a_x, a_y)));
        const double end = kSigmoid ? b_end : -m_max;
        write_pair(out.key_scale, exp2_of(a_x + end), exp2_of(a_y + end));
        if (lane == 0) out.decay = exp2_of(m + end);
        if constexpr (!kSigmoid) m = b_end + m_max;
        return {static_cast<float>(m_x * kLn2), static_cast<float>(m_y * kLn2)};
    }
};

// What the GEMM warpgroups read of one chunk when a segment's own state is summed backward in time.
struct alignas(16) SuffixStage {
    float key_scale[kChunk];  // of k_j in the state at the segment's end, relative to the running maximum
    float rescale;            // of the sum so far, to the new maximum
    bool last;                // no earlier chunk can add anything
};

// Of all tokens of a segment: log2 of their decay, and the largest log2 input gate.
struct SegmentGates {
    double decay, largest;

    // Adds the tokens from `first` on in steps of `stride`, this lane's part. A NaN among them shows in the
    // decay.
    template <bool kSigmoid>
    __device__ inline void add(const GateRows& i, const GateRows& f, int first, int stride, int tokens) {
        constexpr int kBatch = 8;  // loads in flight
        for (int t = first; t < tokens; t += kBatch * stride) {
            float gates[kBatch][2];
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const bool exists = t + n * stride < tokens;
                gates[n][0] = exists ? i[t + n * stride] : kNoInput;
                gates[n][1] = exists ? f[t + n * stride] : kNoForget;
            }
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const double log_i = log2_input<kSigmoid>(gates[n][0]);
                decay += log2_sigmoid(gates[n][1]) + 0. * log_i;
                largest = larger(largest, log_i);
            }
        }
    }
};

// Walks the chunks of a segment backward, by one warp. All sums in log2 units.
template <bool kSigmoid> struct SuffixScan {
    // A token whose weight is this far below the maximum is scaled by 2^x = 0.
    static constexpr double kNothing = -150.;

    double decay = 0.;                 // of the tokens walked so far, together
    float m = kSigmoid ? 0.f : -1e30;  // no less than any weight so far; stays 0 with the sigmoid gate

    __device__ inline void chunk(SuffixStage& out, float2 i, float2 f) {
        const int lane = fresh_laneid();
        const double log_f_x = log2_sigmoid(f.x), log_f_y = log2_sigmoid(f.y);
        const double b_y = warp_inclusive_sum(log_f_x + log_f_y, lane), b_x = b_y - log_f_y;
        const double b_end = __shfl_sync(0xffffffff, b_y, 31);
        const double after = b_end + decay;
        const double w_x = log2_input<kSigmoid>(i.x) + (after - b_x);
        const double w_y = log2_input<kSigmoid>(i.y) + (after - b_y);
        const float before = m;
        if constexpr (!kSigmoid)
            m = fmaxf(m, warp_max(fmaxf(__double2float_ru(w_x), __double2float_ru(w_y))));
        *reinterpret_cast<float2*>(&out.key_scale[2 * lane]) = {exp2_of(w_x - m), exp2_of(w_y - m)};
        if (lane == 0) out.rescale = exp2f(before - m);
        decay = after;
    }

    // Whether earlier tokens, whose input gates are `largest` at most, can add nothing.
    __device__ inline bool forgets(double largest) const { return decay + largest - m <= kNothing; }
};

}  // namespace tfla_tk
