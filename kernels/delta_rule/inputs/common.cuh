// What the kernels of the raw inputs share: the rows of q and k, the gates, and how blocks divide both.
#pragma once

#include "common/launch.cuh"
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

// Rows of q and k: 16 bytes per lane, a group of lanes per row.
template <int kDimK> struct RowGroup {
    static constexpr int kColumns = 8;  // of a lane
    static constexpr int kLanes = kDimK / kColumns;
    static constexpr int kRows = kInputThreads / kLanes;  // that a block has at once

    const DeltaShape& shape;
    int column;

    __device__ inline explicit RowGroup(const DeltaShape& shape)
        : shape(shape), column(static_cast<int>(threadIdx.x) % kLanes * kColumns) {}

    __device__ static inline int number() { return static_cast<int>(threadIdx.x) / kLanes; }
    __device__ static inline float sum(float x) {
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
        return x;
    }
};

// Where a lane's columns of a row are, for the operands whose heads are those of q and k.
struct RowPlace {
    bool exists;  // this lane has columns, and there is such a row
    int64_t batch, token, head;
    int column;

    __device__ inline RowPlace(const DeltaShape& s, int64_t row, int column) : column(column) {
        const unsigned heads = s.heads / s.group, seq = s.seq, index = static_cast<unsigned>(row);
        const unsigned of_tokens = index / heads;
        head = index % heads, token = of_tokens % seq, batch = of_tokens / seq;
        exists = column < s.dim_k && row < static_cast<int64_t>(s.batch) * seq * heads;
    }
    __device__ inline int64_t offset(const Operand& x) const {
        return batch * x.batch_stride + token * x.row_stride + head * x.head_stride + column;
    }
    template <class T> __device__ inline uint4 load(const Operand& x) const {
        if (!exists) return {0, 0, 0, 0};
        return *reinterpret_cast<const uint4*>(static_cast<const T*>(x.data) + offset(x));
    }
    template <class T> __device__ inline void store(const Operand& x, const uint4& bits) const {
        if (exists) *reinterpret_cast<uint4*>(static_cast<T*>(x.data) + offset(x)) = bits;
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
    __device__ inline int64_t offset(const Gate& x, int batch, int token) const {
        return batch * x.batch_stride + token * x.row_stride + head * x.head_stride;
    }
    __device__ inline float load(const Gate& x, int batch, int token) const {
        return load_gate(x, offset(x, batch, token));
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

// Launches a kernel of InputsGlobals.
template <auto kKernel, int kRowsOfBlock, class Params>
void launch_inputs(const Params& p, bool rows, bool gates, cudaStream_t stream, const char* name) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, name);
    auto count = [](std::int64_t x, int of) { return (x + of - 1) / of; };
    const std::int64_t tokens = static_cast<std::int64_t>(s.batch) * s.seq;
    const std::int64_t of_gates = gates ? count(tokens, kInputTokens) * count(s.heads, kGateHeads) : 0;
    const std::int64_t of_rows = rows ? count(tokens * (s.heads / s.group), kRowsOfBlock) : 0;
    const dim3 grid = grid_of(of_gates + of_rows, 1, name);
    launch<kKernel>(InputsGlobals<Params>{p, static_cast<int>(of_gates)}, grid, kInputThreads, s.device,
                    stream, name);
}

}  // namespace tfla_tk::delta_rule
