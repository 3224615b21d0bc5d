// Gates of a segment that is walked backward from its end: the factor of each token in the state at the end.
#pragma once

#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk {

// The chunks of a segment walked so far, from its end. All in log2 units.
template <class P> struct SuffixSum {
    FloatPair decay{};                        // of the tokens walked so far, together
    float m = P::kStabilised ? -1e30f : 0.f;  // maximum of the weights so far, rounded up; else 0

    // Whether no earlier token can add anything, if their log2 input gates are at most `largest`.
    __device__ inline bool forgets(float largest) const {
        return rounded_sum(decay, largest - m) <= kNothing;
    }
};

// One chunk of such a walk, as the GEMM warpgroups and the warp that scans the next chunk read it.
struct alignas(16) SuffixStage {
    float key_scale[kChunk];  // factor on k_j in the state at the end, relative to the maximum so far
    float rescale;            // factor on the sum so far, for the new maximum
    bool last;                // no earlier chunk can add anything
    FloatPair decay;          // SuffixSum's after this chunk
    float m;
};

// Scans one chunk of such a walk, by one warp; lane l has tokens 2 l and 2 l + 1.
template <class P> struct SuffixChunk {
    FloatPair decay, w_x, w_y;  // the chunk's decay, and the weights of the lane's tokens at its end

    __device__ inline SuffixChunk(float2 i, float2 f) {
        const FloatPair log_f_x = P::log2_forget(f.x), log_f_y = P::log2_forget(f.y);
        const FloatPair b_y = warp_inclusive_sum(log_f_x + log_f_y, fresh_laneid()), b_x = b_y - log_f_y;
        decay = of_last_lane(b_y);
        w_x = P::log2_input(i.x) + (decay - b_x);
        w_y = P::log2_input(i.y) + (decay - b_y);
    }

    // sum: of the chunks walked before; this one is added to it.
    __device__ inline void write(SuffixStage& out, SuffixSum<P>& sum) const {
        const FloatPair x = w_x + sum.decay, y = w_y + sum.decay;
        const float before = sum.m;
        if constexpr (P::kStabilised) sum.m = warp_max(fmaxf(before, fmaxf(rounded_up(x), rounded_up(y))));
        sum.decay = decay + sum.decay;
        const int lane = fresh_laneid();
        *reinterpret_cast<float2*>(&out.key_scale[2 * lane]) = {exp2f(rounded_sum(x, -sum.m)),
                                                                exp2f(rounded_sum(y, -sum.m))};
        if (lane == 0) out.rescale = exp2f(before - sum.m), out.decay = sum.decay, out.m = sum.m;
    }
};

// Over all tokens of a segment: log2 of their decay, and the largest log2 input gate.
struct SegmentGates {
    FloatPair decay{};
    float largest = -1e30f;  // rounded up

    // Adds this lane's tokens: every `stride`-th from `first` on. A NaN in any gate makes the decay NaN.
    template <class P>
    __device__ inline void add(const GateRows& i, const GateRows& f, int first, int stride, int tokens) {
        constexpr int kBatch = 8;  // loads in flight
        for (int t = first; t < tokens; t += kBatch * stride) {
            float gates[kBatch][2];
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const bool exists = t + n * stride < tokens;
                gates[n][0] = P::input([&](float none) { return exists ? i[t + n * stride] : none; });
                gates[n][1] = P::forget([&](float none) { return exists ? f[t + n * stride] : none; });
            }
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const float log_i = rounded_up(P::log2_input(gates[n][0]));
                decay = decay + (P::log2_forget(gates[n][1]) + 0.f * log_i);
                largest = fmaxf(largest, log_i);
            }
        }
    }
};

}  // namespace tfla_tk
