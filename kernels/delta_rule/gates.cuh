// Gates of a chunk: the cumulative log decay, and the factors of a walk per token.
#pragma once

#include "common/sync.cuh"
#include "common/warp.cuh"
#include "sequence/gate_loads.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

constexpr float kLog2e = 1.4426950408889634f;
// A log decay below is taken for it: it still decays to zero, and differences of sums stay finite.
constexpr float kLeastLogDecay = -1e4f;

__device__ inline void write_pair(float* values, int place, float2 x) {
    *reinterpret_cast<float2*>(&values[place]) = x;
}

// log2 of the decay from the chunk's start up to and with each of the lane's tokens 2 l and 2 l + 1, by one
// warp. Tokens past `tokens`, and all without a gate, do not decay.
__device__ inline float2 cumulative_log2_decay(float2 log_decay) {
    auto bounded = [](float x) { return kLog2e * (x < kLeastLogDecay ? kLeastLogDecay : x); };
    const float first = bounded(log_decay.x), second = bounded(log_decay.y);
    const float sum = warp_inclusive_sum(first + second, fresh_laneid());
    return {sum - second, sum};
}

__device__ inline float2 load_log_decay(const Gate& g, int batch, int head, int row, int chunk, int tokens) {
    if (g.data == nullptr) return {0.f, 0.f};
    return GateRows(g, batch, head, row).pair(chunk, tokens, 0.f);
}

__device__ inline float2 cumulative_log2_decay(const Gate& g, int batch, int head, int row, int chunk,
                                               int tokens) {
    return cumulative_log2_decay(load_log_decay(g, batch, head, row, chunk, tokens));
}

// One number per token, in the order of an accumulator's columns: the four tokens of 16 that a lane has are
// neighbours.
struct alignas(16) TokenFactors {
    float data[kChunk];

    // Of tokens 2 l and 2 l + 1, by lane l.
    __device__ inline void write(int lane, float2 x) {
        write_pair(data, lane / 8 * 16 + lane % 4 * 4 + lane / 4 % 2 * 2, x);
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

}  // namespace tfla_tk::delta_rule
