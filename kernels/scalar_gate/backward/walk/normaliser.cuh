// The normaliser state n of dq and dk, by wgmmas of the state warpgroups.
//
//     n = decay n + sum_t values_t x_t     a GEMM with eight columns beside the state's update
//     out^T += n y^T                       a GEMM with k = 16 before the state is read; scaled with the rest
//     of out
//
// dq: x = key_scale, y = e. dk: x = key_scale e, y = 1. bf16 takes unscaled values. In fp16 such x may be
// below its range where gradients are small, so it takes the scaled, rounded values of the state's update,
// and x / key_scale. x is split into a high and a low part in columns 0 and 1 of eight; the others are 0. As
// operands n and y are high and low parts in bf16 whatever the tensors' type, since n may exceed the range of
// fp16. In fp16 the high part of dk's x is in units of kUnit, so that e may reach 1e8.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "kittens.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::mlstm {

// Operand of 64 tokens x eight columns, zero but for the first two columns. Written by one warp; lane l
// writes tokens 2 l and 2 l + 1.
struct alignas(128) NormOperand {
    uint4 units[kChunk];

    __device__ inline void clear() {
        for (int n = fresh_laneid(); n < kChunk; n += 32) units[n] = {0, 0, 0, 0};
        __syncwarp();
    }

    // Layout in which tokens are rows of 16 bytes. of_tokens: columns 0 and 1 of each token.
    template <class T2> __device__ inline void write_rows(const T2 (&of_tokens)[2]) {
        auto* to = reinterpret_cast<T2*>(&units[2 * fresh_laneid()]);
        to[0] = of_tokens[0], to[sizeof(uint4) / sizeof(T2)] = of_tokens[1];
    }
    // Descriptor with tokens as N. Both halves of k = 16 are these eight columns.
    __device__ inline uint64_t rows() const {
        return static_cast<uint64_t>(128 >> 4) << 32 | (shared_address(units) & 0x3FFFF) >> 4;
    }

    // Layout in which columns are rows of 16 bytes, eight tokens each. of_columns: the lane's tokens in each
    // column.
    template <class T2> __device__ inline void write_columns(const T2 (&of_columns)[2]) {
        const int lane = fresh_laneid();
        auto* to = reinterpret_cast<T2*>(&units[lane / 4 * 8]) + lane % 4;
        to[0] = of_columns[0], to[sizeof(uint4) / sizeof(T2)] = of_columns[1];
    }
    // Descriptor with the step-th 16 tokens as k and columns as N.
    __device__ inline uint64_t columns(int step) const { return OperandRows16B(units).at(0, step); }
};

// n of rows lane / 4 and + 8 of a warp's 16, in the first lane of every four, which has columns 0 and 1.
template <class T, bool kBackward> struct Norm {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr float kUnit = kBackward && std::is_same_v<T, kittens::half> ? 4096.f : 1.f;

    static constexpr bool kOfScaled = std::is_same_v<T, kittens::half>;  // takes the scaled values

    float2 sums[2]{};  // the accumulator's two columns

    __device__ inline float row(int half) const { return kUnit * sums[half].x + sums[half].y; }
    __device__ inline void set(int half, float n) { sums[half] = {0.f, n}; }
    __device__ inline void scale(float factor) {
#pragma unroll
        for (auto& x : sums) x = {x.x * factor, x.y * factor};
    }

    // Writes the operands of a chunk, by one warp: x and e of the lane's tokens, and dk's ones in place of e.
    __device__ static inline void write_x(NormOperand& out, float2 key_scale, float2 e) {
        float2 x = kOfScaled ? float2{1.f, 1.f} : key_scale;
        if constexpr (kBackward) x = {x.x * e.x, x.y * e.y};
        const T2 high = from_float2<T2>({x.x / kUnit, x.y / kUnit});
        const float2 rounded = to_float2(high);
        out.write_columns({high, from_float2<T2>({x.x - kUnit * rounded.x, x.y - kUnit * rounded.y})});
    }
    __device__ static inline void write_e(NormOperand& out, float2 e) {
        using Pair = kittens::bf16_2;
        const HighAndLow<Pair> parts(e);
        out.write_rows({Pair{parts.high.x, parts.low.x}, Pair{parts.high.y, parts.low.y}});
    }
    __device__ static inline void write_ones(NormOperand& out) { write_e(out, {1.f, 1.f}); }

    // n as an A fragment in bf16, whatever the type of A.
    template <class A> __device__ inline void fill(A& a) const {
        const HighAndLow<kittens::bf16_2> upper({row(0), row(0)}), lower({row(1), row(1)});
        auto& x = as_bf16(a).tiles[0][0].data;
        x[0] = upper.high, x[1] = lower.high, x[2] = upper.low, x[3] = lower.low;
    }
    template <class A> __device__ static inline auto& as_bf16(A& a) {
        using Fragment = kittens::rt<kittens::bf16, 16, 16>;
        using Same = std::conditional_t<std::is_const_v<A>, const Fragment, Fragment>;
        return reinterpret_cast<Same&>(a);
    }
};

}  // namespace tfla_tk::mlstm
