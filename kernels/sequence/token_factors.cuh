// Factors of a chunk's tokens for accumulators whose columns are tokens.
#pragma once

#include "kittens.cuh"
#include "sequence/cut.h"

namespace tfla_tk {

__device__ inline void write_pair(float* values, int place, float2 x) {
    *reinterpret_cast<float2*>(&values[place]) = x;
}

// One number per token, in the order of an accumulator's columns: the four tokens of 16 that a lane has are
// neighbours.
struct alignas(16) TokenFactors {
    float data[kChunk];

    // Of tokens 2 l and 2 l + 1, by lane l.
    __device__ inline void write(int lane, float2 x) {
        write_pair(data, lane / 8 * 16 + lane % 4 * 4 + lane / 4 % 2 * 2, x);
    }
    __device__ inline float of(int token) const {
        return data[token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2];
    }
    // Of this lane's columns of the j-th 16: column pairs 0 and 1.
    struct Columns {
        float2 of[2];
    };
    __device__ inline Columns columns(int j, int lane) const {
        const float4 x = *reinterpret_cast<const float4*>(&data[16 * j + lane % 4 * 4]);
        return {{{x.x, x.y}, {x.z, x.w}}};
    }
};

}  // namespace tfla_tk
