// Gate policies: what the two gates of a token mean. A policy has
//   kStabilised   whether weights are relative to a running maximum of the gates, m
//   kHasInput     whether there is an input gate
//   input(load)   loads the input gate as stored. It calls load(none), where `none` is the value that a token
//                 past the end of the sequence gets, such that it adds nothing
//   forget(load)  the same for the forget gate; a token past the end must forget nothing
//   log2_input, log2_forget           log2 of the gates, from what is stored
//   input_gradient (with an input gate), forget_gradient
//                                     gradient of what is stored, from that of the gate's natural log
// A policy sees one stored number per token. A parameter per head goes through a kernel in front of the walk,
// as the delta rule's raw inputs do (delta_rule/inputs/).
#pragma once

#include "common/float_pair.cuh"
#include "kittens.cuh"
#include "scalar_gate/bindings/params.h"
#include "sequence/log_gates.cuh"

namespace tfla_tk {

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
__device__ inline FloatPair log2_sigmoid(float x) {
    return log2_exp(fminf(x, 0.f)) + -log2_1p(__expf(-fabsf(x)));
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// mLSTM's stored gates of a token past the end of the sequence.
constexpr float kNoInput = -INFINITY, kNoForget = INFINITY;

// mLSTM's forget gate: the sigmoid of what is stored.
struct SigmoidForget {
    static constexpr bool kHasInput = true;
    __device__ static inline FloatPair log2_forget(float x) { return log2_sigmoid(x); }
    __device__ static inline float forget_gradient(float of_log, float x) { return of_log * sigmoid(-x); }
    template <class Load> __device__ static inline auto forget(Load load) { return load(kNoForget); }
    template <class Load> __device__ static inline auto input(Load load) { return load(kNoInput); }
};

// mLSTMexp: the input gate is an exponential.
struct ExponentialInput : SigmoidForget {
    static constexpr bool kStabilised = true;
    __device__ static inline FloatPair log2_input(float x) { return log2_exp(x); }
    __device__ static inline float input_gradient(float of_log, float) { return of_log; }
};

// mLSTMsig: it is a sigmoid.
struct SigmoidInput : SigmoidForget {
    static constexpr bool kStabilised = false;
    __device__ static inline FloatPair log2_input(float x) { return log2_sigmoid(x); }
    __device__ static inline float input_gradient(float of_log, float x) { return of_log * sigmoid(-x); }
};

// Simple GLA, RetNet, Lightning, the delta rule: no input gate; the decay's natural log is stored.
struct ScalarDecay {
    static constexpr bool kStabilised = false, kHasInput = false;
    // ln 2^-30. Sums in fp32 do not resolve the flow of gradient through a gate that lets less through; what
    // they give is rounding. The gradient of a rate such as e^{A_log} would have it times the rate.
    static constexpr float kClosed = -20.794415f;
    __device__ static inline FloatPair log2_input(float) { return {0.f, 0.f}; }
    __device__ static inline float forget_gradient(float of_log, float x) {
        return x < kClosed ? 0.f : of_log;
    }
    __device__ static inline FloatPair log2_forget(float x) { return log2_exp(x); }
    template <class Load> __device__ static inline auto forget(Load load) { return load(0.f); }
    template <class Load> __device__ static inline auto input(Load load) { return decltype(load(0.f)){}; }
};

// Calls run(policy) with the policy of a call's gates.
template <class Run> __host__ __device__ inline void with_gate(GateKind kind, Run run) {
    if (kind == GateKind::exponential)
        run(ExponentialInput{});
    else if (kind == GateKind::sigmoid)
        run(SigmoidInput{});
    else
        run(ScalarDecay{});
}

// The same of a kernel with a normaliser, which no scalar decay has, or without one, which the exponential
// gate always has.
template <bool kNormalize, class Run> __device__ inline void with_gate_of_kernel(GateKind kind, Run run) {
    if (kind == GateKind::sigmoid)
        run(SigmoidInput{});
    else
        run(std::conditional_t<kNormalize, ExponentialInput, ScalarDecay>{});
}

}  // namespace tfla_tk
