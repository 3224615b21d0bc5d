// The gate side of one chunk of mLSTM: three numbers per token, scanned by one warp ahead of the GEMMs.
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

// Gates below this count as it: sums over a chunk then stay where fp32 still resolves about 1, so that
// rounding a row's reference up costs no range.
constexpr float kLeastLogGate = -2e5f;

// log2(e^x), finite also for x = -inf; NaN stays NaN.
__device__ inline double log2_exp(float x) {
    return static_cast<double>(x < kLeastLogGate ? kLeastLogGate : x) * kLog2eDouble;
}

// log2(sigmoid(x)).
__device__ inline double log2_sigmoid(float x) { return log2_exp(fminf(x, 0.f) - log1pf(__expf(-fabsf(x)))); }

__device__ inline double warp_inclusive_sum(double x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(0xffffffff, x, step);
        if (fresh_laneid() >= step) x += other;
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

__device__ inline double warp_max(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

// Walks the chunks of one head, by one warp: lane l owns tokens 2 l and 2 l + 1 of a chunk.
template <bool kSigmoid> struct GateScan {
    double m;  // stabiliser at the chunk's start, log2 units; stays 0 with the sigmoid gate

    // i, f: pre-activations of the lane's two tokens; `tokens` of the chunk's 64 exist.
    __device__ inline void chunk(GateStage& out, float2 i, float2 f, int tokens, float scale,
                                 double log2_scale) {
        const int lane = fresh_laneid();
        const bool exists_x = 2 * lane < tokens, exists_y = 2 * lane + 1 < tokens;
        auto log2_input = [](float x) { return kSigmoid ? log2_sigmoid(x) : log2_exp(x); };
        const double log_f_x = exists_x ? log2_sigmoid(f.x) : 0.;
        const double log_f_y = exists_y ? log2_sigmoid(f.y) : 0.;
        const double b_y = warp_inclusive_sum(log_f_x + log_f_y), b_x = b_y - log_f_y;
        const double b_end = __shfl_sync(0xffffffff, b_y, 31);
        const double a_x = exists_x ? log2_input(i.x) - b_x : -1e30;
        const double a_y = exists_y ? log2_input(i.y) - b_y : -1e30;

        auto exp2_of = [](double x) { return exp2f(static_cast<float>(x)); };
        auto write_pair = [&](float (&values)[kChunk], float x, float y) {
            *reinterpret_cast<float2*>(&values[2 * lane]) = {x, y};
        };
        const double column_x = a_x + log2_scale, column_y = a_y + log2_scale;
        const float high_x = static_cast<float>(column_x), high_y = static_cast<float>(column_y);
        *reinterpret_cast<float4*>(&out.column[2 * lane]) = {
            high_x, static_cast<float>(column_x - static_cast<double>(high_x)), high_y,
            static_cast<float>(column_y - static_cast<double>(high_y))};
        const float up_x = fmaxf(__double2float_ru(a_x), __double2float_ru(m));
        const float up_y = fmaxf(__double2float_ru(a_y), up_x);

        const float row_y = warp_inclusive_max(up_y);
        const float before = __shfl_up_sync(0xffffffff, row_y, 1);
        const float row_x = fresh_laneid() == 0 ? up_x : fmaxf(before, up_x);
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
        if (fresh_laneid() == 0) out.decay = exp2_of(m + end);
        if constexpr (!kSigmoid) m = b_end + m_max;
    }
};

}  // namespace tfla_tk
