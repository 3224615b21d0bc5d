// Gates of a segment that is walked from its end backward: what each token adds to the state at the end.
#pragma once

#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk {

// A segment walked backward in time, up to a chunk. All in log2 units.
template <class P> struct SuffixSum {
    FloatPair decay{};                        // of the tokens walked so far, together
    float m = P::kStabilised ? -1e30f : 0.f;  // no less than any weight so far; stays 0 with the sigmoid gate

    // Whether earlier tokens, whose input gates are `largest` at most, can add nothing.
    __device__ inline bool forgets(float largest) const {
        return rounded_sum(decay, largest - m) <= kNothing;
    }
};

// What is read of one chunk of such a walk, by the GEMM warpgroups and by the warp that scans the next one.
struct alignas(16) SuffixStage {
    float key_scale[kChunk];  // of k_j in the state at the segment's end, relative to the running maximum
    float rescale;            // of the sum so far, to the new maximum
    bool last;                // no earlier chunk can add anything
    FloatPair decay;          // of SuffixSum, with this chunk
    float m;
};

// One chunk of such a walk, by one warp: lane l owns tokens 2 l and 2 l + 1.
template <class P> struct SuffixChunk {
    FloatPair decay, w_x, w_y;  // of the chunk, and the weights at its end of the lane's tokens

    __device__ inline SuffixChunk(float2 i, float2 f) {
        const FloatPair log_f_x = P::log2_forget(f.x), log_f_y = P::log2_forget(f.y);
        const FloatPair b_y = warp_inclusive_sum(log_f_x + log_f_y, fresh_laneid()), b_x = b_y - log_f_y;
        decay = of_last_lane(b_y);
        w_x = P::log2_input(i.x) + (decay - b_x);
        w_y = P::log2_input(i.y) + (decay - b_y);
    }

    // sum: of the chunks walked before, then with this one.
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

// Of all tokens of a segment: log2 of their decay, and the largest log2 input gate.
struct SegmentGates {
    FloatPair decay{};
    float largest = -1e30f;  // rounded up

    // Adds the tokens from `first` on in steps of `stride`, this lane's part. A NaN among them shows in the
    // decay.
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
