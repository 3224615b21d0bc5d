// The gates of up to 16 tokens in log2 units: the weight of each token in h and in the last state.
#pragma once

#include "decode/mlstm/gates.cuh"
#include "decode/sums.cuh"

namespace tfla_tk::decode {

// Notation of scalar_gate/gate/gates.cuh: column[j] is a_j, row[t] is M_t, or -b_t with the sigmoid gate,
// which has no stabiliser. write and decay are relative to e^m with m as rounded for storage.
template <int kTokens> struct SequenceGates {
    double column[kTokens], row[kTokens];
    float inter[kTokens];  // factor on q_t C: scale 2^{m_in - row_t}
    float floor[kTokens];  // lower bound of the normaliser
    float write[kTokens];  // factor on k_j v_j^T in the state
    float decay, m;        // factor on the state, and its stabiliser

    // Factor on the score q_t k_j in h_t, without scale.
    __device__ inline float weight(int t, int j) const { return power_of_two(column[j] - row[t]); }
};

__device__ inline double warp_inclusive_max(double x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = larger(__shfl_up_sync(kAllLanes, x, step), x);
    return x;
}

// Scans the tokens, by one warp, one token per lane; i, f: its pre-activations.
template <int kTokens>
__device__ inline void scan_gates(SequenceGates<kTokens>& out, const MlstmParams& g, float i, float f,
                                  float m) {
    const int lane = threadIdx.x % 32;
    const auto log_i = static_cast<double>(g.sigmoid_gate ? log2_sigmoid(i) : log2_exp(i));
    // 0 log i carries a NaN of i to all later tokens
    const double b = warp_inclusive_sum(static_cast<double>(log2_sigmoid(f)) + 0. * log_i, lane);
    const double a = log_i - b;
    const double entering = g.sigmoid_gate ? 0. : static_cast<double>(m) * kLog2eDouble;
    const double largest = larger(entering, warp_inclusive_max(a));
    const double row = g.sigmoid_gate ? -b : largest;

    const double exact = __shfl_sync(kAllLanes, b + row, g.tokens - 1);
    const double b_end = __shfl_sync(kAllLanes, b, g.tokens - 1);
    const float stored =
        g.sigmoid_gate ? 0.f : stored_stabiliser(g.after.m_dtype, static_cast<float>(exact * kLogOf2));
    const double end = b_end - static_cast<double>(stored) * kLog2eDouble;
    if (lane < kTokens) {
        out.column[lane] = a;
        out.row[lane] = row;
        out.inter[lane] = g.scale * power_of_two(entering - row);
        out.floor[lane] = power_of_two(-(b + row));
        out.write[lane] = power_of_two(a + end);
    }
    if (lane == 0) {
        out.decay = power_of_two(entering + end);
        out.m = stored;
    }
}

}  // namespace tfla_tk::decode
