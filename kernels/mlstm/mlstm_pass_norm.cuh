// n of dq and dk, on the tensor cores: a column of the state's own, kept by the state warpgroups.
//
//     n = decay n + sum_t (values . key_scale)_t x_t    beside the state's update: eight columns more
//     out^T += n y^T, scaled as the rest of out is      before the state is read: 16 of k more
//
// with x = 1 and y = e for dq, x = e and y = 1 for dk. e is two numbers, a high and a low part, in columns 0
// and 1 of eight; the others are 0. So n is two numbers, each of which is high and low parts again where it
// is an operand: those are the first eight columns of k, these the other eight. As an operand n is bf16
// always, and so is y: fp16 ends where n need not. Where fp16 has e in the place of x its high part is in
// units of kUnit, which takes it to 1e8.
#pragma once

#include "kittens.cuh"
#include "tfla_tk/gates.cuh"
#include "tfla_tk/tiles.cuh"
#include "tfla_tk/wgmma.cuh"

namespace tfla_tk::mlstm {

// Eight columns of a chunk's 64 tokens, of which the first two are not 0. Written by one warp, lane l two
// tokens, 2 l and 2 l + 1.
struct alignas(128) NormOperand {
    uint4 units[kChunk];

    __device__ inline void clear() {
        for (int n = fresh_laneid(); n < kChunk; n += 32) units[n] = {0, 0, 0, 0};
        __syncwarp();
    }

    // Tokens are rows of 16 bytes. of_tokens: columns 0 and 1.
    template <class T2> __device__ inline void write_rows(const T2 (&of_tokens)[2]) {
        auto* to = reinterpret_cast<T2*>(&units[2 * fresh_laneid()]);
        to[0] = of_tokens[0], to[sizeof(uint4) / sizeof(T2)] = of_tokens[1];
    }
    // Descriptor: tokens are N. Both halves of 16 of k are these eight columns.
    __device__ inline uint64_t rows() const {
        return static_cast<uint64_t>(128 >> 4) << 32 | (shared_address(units) & 0x3FFFF) >> 4;
    }

    // Columns are rows of 16 bytes, eight tokens each. of_columns: the lane's tokens.
    template <class T2> __device__ inline void write_columns(const T2 (&of_columns)[2]) {
        const int lane = fresh_laneid();
        auto* to = reinterpret_cast<T2*>(&units[lane / 4 * 8]) + lane % 4;
        to[0] = of_columns[0], to[sizeof(uint4) / sizeof(T2)] = of_columns[1];
    }
    // Descriptor: tokens are k, of which the step-th 16, and columns are N.
    __device__ inline uint64_t columns(int step) const { return OperandRows16B(units).at(0, step); }
};

// n of the rows lane / 4 and + 8 of a warp's 16: in the first lane of every four, which has columns 0 and 1.
template <class T, bool kBackward> struct Norm {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    static constexpr float kUnit = kBackward && std::is_same_v<T, kittens::half> ? 4096.f : 1.f;

    float2 sums[2]{};  // of the two columns

    __device__ inline float row(int half) const {
        return kBackward ? kUnit * sums[half].x + sums[half].y : sums[half].x;
    }
    __device__ inline void set(int half, float n) { sums[half] = {kBackward ? 0.f : n, n}; }
    __device__ inline void scale(float factor) {
#pragma unroll
        for (auto& x : sums) x = {x.x * factor, x.y * factor};
    }

    // The factors x and y, by one warp: those that are always the same, and those of a chunk, whose tokens 2
    // lane and the next one have e.
    __device__ static inline void write_constants(NormOperand& out) {
        out.clear();
        if constexpr (kBackward) {
            const auto units = from_float2<kittens::bf16_2>({kUnit, 1.f});
            out.write_rows({units, units});
        } else {
            const auto ones = from_float2<T2>({1.f, 1.f});
            out.write_columns({ones, ones});
        }
    }
    __device__ static inline void write_e(NormOperand& out, float2 e) {
        if constexpr (kBackward) {
            const T2 high = from_float2<T2>({e.x / kUnit, e.y / kUnit});
            const float2 rounded = to_float2(high);
            out.write_columns({high, from_float2<T2>({e.x - kUnit * rounded.x, e.y - kUnit * rounded.y})});
        } else {
            using Pair = kittens::bf16_2;
            const HighAndLow<Pair> parts(e);
            out.write_rows({Pair{parts.high.x, parts.low.x}, Pair{parts.high.y, parts.low.y}});
        }
    }

    // As an operand of bf16, whatever A is of.
    template <class A> __device__ inline void fill(A& a) const {
        const HighAndLow<kittens::bf16_2> upper(sums[0]), lower(sums[1]);
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
