// mLSTM's gates as factors. C and n of token t are relative to e^{m_t}.
#pragma once

#include "common/warp.cuh"
#include "decode/mlstm/numbers.cuh"
#include "decode/sums.cuh"
#include "scalar_gate/gate/policy.cuh"

namespace tfla_tk::decode {

struct Factors {
    float decay, write;  // on the state, and on k v^T
    float floor, eps;    // the normaliser is max(|d|, floor) + eps
    float m;             // the stabiliser
};

// 2^x. Differences of log gates are fp64, so that gates of +-1e4 cancel.
__device__ inline float power_of_two(double x) { return exp2f(static_cast<float>(x)); }

// Factors of every token by one warp: lane t returns those of token t. Lanes behind the last token return
// nothing of use. The last token's are relative to e^m with m as it is stored: then C e^m is exact, whatever
// m loses by rounding. i, f: the token's pre-activations. m: the stabiliser before the first token.
template <int T> __device__ inline Factors factors_of(const MlstmParams& p, float i, float f, float m) {
    const auto log_f = static_cast<double>(log2_sigmoid(f));
    if (p.sigmoid_gate)
        return {power_of_two(log_f), power_of_two(static_cast<double>(log2_sigmoid(i))), 1.f, p.eps, 0.f};
    constexpr double kOneOverLog2e = 0.6931471805599453;
    // in 16 bits m is at least this: C and n are rescaled by its rounding error, which would exceed fp32
    constexpr float kLeast = -16384.f;
    const auto log_i = static_cast<double>(log2_exp(i)), first = static_cast<double>(m) * kLog2eDouble;
    const int lane = threadIdx.x % 32;
    // m_t = max(log_f_t + m_{t-1}, log_i_t) is max(kept + m_first, written)
    double kept = log_f, written = log_i;
#pragma unroll
    for (int step = 1; step < T; step *= 2) {
        const double earlier = __shfl_up_sync(kAllLanes, written, step);
        const double all = kept + __shfl_up_sync(kAllLanes, kept, step);
        if (lane >= step) written = larger(earlier + kept, written), kept = all;
    }
    const double exact = larger(kept + first, written);
    double before = first, unit = exact;
    if constexpr (T > 1) {
        before = __shfl_up_sync(kAllLanes, exact, 1);
        if (lane == 0) before = first;
    }
    auto stored = static_cast<float>(exact * kOneOverLog2e);
    if (p.after.m_dtype != DType::float32)
        stored = rounded(p.after.m_dtype, stored < kLeast ? kLeast : stored);
    if (T == 1 || lane == p.tokens - 1) unit = static_cast<double>(stored) * kLog2eDouble;
    return {power_of_two(log_f + before - unit), power_of_two(log_i - unit), power_of_two(-unit),
            p.eps * power_of_two(exact - unit), stored};
}

// Not every token needs to multiply the state by its decay: what is kept is the state over a debt, the
// product of the decays since the last payment. What is written is divided by the debt, what is read is
// multiplied by it. A token pays, by multiplying the state, where the debt would become too small, and the
// last one does.
struct Debt {
    static constexpr float kLeast = 1.f / (1ll << 60);
    float own, payment;  // of the lane's token: the debt behind it, and what it multiplies by
    unsigned paid;       // a bit per token: it pays

    // By one warp. decay: of the lane's token.
    template <int T> __device__ static inline Debt of(float decay, int tokens) {
        if constexpr (T == 1) return {1.f, decay, 1};
        Debt found{1.f, 1.f, 0};
        const int lane = threadIdx.x % 32;
        float debt = 1.f;
#pragma unroll
        for (int t = 0; t < T; t++) {
            const float next = __fmul_rn(debt, __shfl_sync(kAllLanes, decay, t));
            const bool pays = t == tokens - 1 || !(next >= kLeast);  // NaN is paid
            debt = pays ? 1.f : next;
            if (pays) found.paid |= 1u << t;
            if (lane == t) found.own = debt, found.payment = next;
        }
        return found;
    }
};

}  // namespace tfla_tk::decode
