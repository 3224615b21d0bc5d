// Sums per token over the rows of a warp's transposed tile.
#pragma once

#include "kittens.cuh"
#include "sequence/cut.h"

namespace tfla_tk::delta_rule {

constexpr int kSumColumns = 16;  // of V, of a part of the sums for dbeta: a warp's

// A lane's sums of two tokens of a chunk, `token` and the next one.
struct TwoSums {
    int token;
    float2 of;

    // Where the chunk has so many tokens.
    __device__ inline void store(float* to, int tokens) const {
        if (token < tokens) to[token] = of.x;
        if (token + 1 < tokens) to[token + 1] = of.y;
    }
};

// Sums of a value per token over the 16 rows of a warp's transposed tile. product(j, k): of the pair of
// tokens that this lane has in data[k] of the j-th 16.
template <class Product> __device__ inline TwoSums token_sums(int lane, Product product) {
    float x[kChunk / 4];  // pairs of tokens of 16 j + 8 half: place 4 j + 2 half
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 upper = product(j, 2 * half), lower = product(j, 2 * half + 1);
            x[4 * j + 2 * half] = upper.x + lower.x, x[4 * j + 2 * half + 1] = upper.y + lower.y;
        }
    // lanes that differ in lane / 4 have other rows of the same tokens: each step halves what a lane keeps
    auto fold = [&]<int kKept>(int bit) {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < kKept; i++) {
            const float given = upper ? x[i] : x[i + kKept], kept = upper ? x[i + kKept] : x[i];
            x[i] = kept + __shfl_xor_sync(0xffffffff, given, bit);
        }
    };
    fold.template operator()<8>(16);
    fold.template operator()<4>(8);
    fold.template operator()<2>(4);
    // lane / 4 in binary: which half of j, which j of the two, which half of 16 tokens
    return {lane / 4 * 8 + 2 * (lane % 4), {x[0], x[1]}};
}

}  // namespace tfla_tk::delta_rule
