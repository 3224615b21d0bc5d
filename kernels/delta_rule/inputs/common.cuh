// What the kernels of the raw inputs share: the rows of q and k, the gates, and how blocks divide both.
#pragma once

#include "common/tiles.cuh"
#include "delta_rule/bindings/params_inputs.h"
#include "sequence/gate_loads.cuh"
#include "sequence/log_gates.cuh"

namespace tfla_tk::delta_rule {

constexpr int kInputThreads = 256;
constexpr int kInputWarps = kInputThreads / 32;
constexpr int kGateHeads = 32;  // of a block for the gates
constexpr float kNormEps = 1e-6f;

// The first blocks make the gates, the others rows of q and k.
template <class Params> struct InputsGlobals {
    Params params;
    int gate_blocks;
};

// What a lane has of a row: eight numbers of its first half and eight of its second half.
struct LaneUnits {
    uint4 of[2];
};

// A row of q and k, or of what has their heads, that a group of lanes has.
template <class T, int kDimK> struct Row {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr int kLanes = kDimK / 16;
    static constexpr int kRows = kInputThreads / kLanes;  // of a block

    bool exists;
    int64_t batch, token, head;
    int column, columns;

    __device__ inline Row(const DeltaShape& s, int block) : columns(s.dim_k) {
        const int thread = threadIdx.x;
        const int64_t row = static_cast<int64_t>(block) * kRows + thread / kLanes;
        const unsigned heads = s.heads / s.group, seq = s.seq, index = static_cast<unsigned>(row);
        const unsigned of_tokens = index / heads;
        head = index % heads, token = of_tokens % seq, batch = of_tokens / seq;
        exists = row < static_cast<int64_t>(s.batch) * seq * heads;
        column = thread % kLanes * 8;
    }
    __device__ inline LaneUnits load(const Operand& x) const {
        LaneUnits found{};
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (has(half)) found.of[half] = *place(x, half);
        return found;
    }
    __device__ inline void store(const Operand& x, const LaneUnits& units) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (has(half)) *place(x, half) = units.of[half];
    }
    __device__ static inline float dot_product(const LaneUnits& x, const LaneUnits& y) {
        float sum = dot<T2>(x.of[0], y.of[0]) + dot<T2>(x.of[1], y.of[1]);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        return sum;
    }
    // f(x, y) of every two neighbours of x and of y.
    template <class F> __device__ static inline LaneUnits map(const LaneUnits& x, const LaneUnits& y, F f) {
        LaneUnits found;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const T2* const of_x = reinterpret_cast<const T2*>(&x.of[half]);
            const T2* const of_y = reinterpret_cast<const T2*>(&y.of[half]);
            T2* const rounded = reinterpret_cast<T2*>(&found.of[half]);
#pragma unroll
            for (int n = 0; n < 4; n++)
                rounded[n] = from_float2<T2>(f(to_float2(of_x[n]), to_float2(of_y[n])));
        }
        return found;
    }

  private:
    __device__ inline bool has(int half) const { return exists && column + half * (kDimK / 2) < columns; }
    __device__ inline uint4* place(const Operand& x, int half) const {
        const int64_t offset = batch * x.batch_stride + token * x.row_stride + head * x.head_stride;
        return reinterpret_cast<uint4*>(static_cast<T*>(x.data) + offset + column + half * (kDimK / 2));
    }
};

// The tokens and heads of a block for the gates: a lane per head, the tokens in turn by the warps.
struct GateTile {
    int head, part;

    __device__ inline explicit GateTile(const DeltaShape& s) {
        const int tiles = (s.heads + kGateHeads - 1) / kGateHeads;
        head = static_cast<int>(blockIdx.x) % tiles * kGateHeads + static_cast<int>(threadIdx.x) % 32;
        part = static_cast<int>(blockIdx.x) / tiles;
    }
    // Calls f(batch, token in its row, token of all) for this warp's tokens, where there is such a head.
    template <class F> __device__ inline void for_tokens(const DeltaShape& s, F f) const {
        if (head >= s.heads) return;
        const int64_t first = static_cast<int64_t>(part) * kInputTokens, all = int64_t{1} * s.batch * s.seq;
#pragma unroll
        for (int n = 0; n < kInputTokens / kInputWarps; n++) {
            const int64_t token = first + n * kInputWarps + threadIdx.x / 32;
            if (token >= all) return;
            const unsigned seq = s.seq, index = static_cast<unsigned>(token);
            f(static_cast<int>(index / seq), static_cast<int>(index % seq), token);
        }
    }
    __device__ inline float load(const Gate& x, int batch, int token) const {
        return load_gate(x, batch * x.batch_stride + token * x.row_stride + head * x.head_stride);
    }
    __device__ inline float of_head(const Gate& x) const { return load_gate(x, head * x.head_stride); }
};

// e^x to about an ulp. NOTES: expf is compiled to its fast form, whose relative error grows with |x|.
__device__ inline float exp_of(float x) {
    constexpr float kLn2 = 0.6931471805599453f;
    const FloatPair y = log2_exp(x);
    return exp2f(y.high) * (1.f + kLn2 * y.low);
}

// sigmoid(x) and sigmoid(-x).
struct Sigmoids {
    float of, of_minus;

    __device__ inline explicit Sigmoids(float x) {
        const float e = exp_of(-fabsf(x)), large = 1.f / (1.f + e), small = e * large;
        of = x < 0.f ? small : large, of_minus = x < 0.f ? large : small;
    }
};

__device__ inline float softplus(float x) {
    const float rest = log1pf(exp_of(-fabsf(x)));
    return x > 0.f ? x + rest : rest;
}

// What makes a head's log decay: its rate e^{A_log}, and the bias.
struct HeadDecay {
    float rate = 0.f, bias = 0.f;

    __device__ inline HeadDecay(const GateTile& tile, const DeltaShape& s, const Gate& a_log,
                                const Gate& dt_bias) {
        if (a_log.data == nullptr || tile.head >= s.heads) return;
        rate = exp_of(tile.of_head(a_log));
        if (dt_bias.data != nullptr) bias = tile.of_head(dt_bias);
    }
};

}  // namespace tfla_tk::delta_rule
