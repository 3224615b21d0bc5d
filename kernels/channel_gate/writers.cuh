// What a block of 16 tokens writes to a state, by a warp: k times the product of e^g behind a token (forward
// in time), or s q times that up to and with it (backward in time). It is in two parts, high + low.
#pragma once

#include "channel_gate/block.cuh"

namespace tfla_tk::channel_gate {

constexpr uint32_t kFloatRow = kBlockChannels * sizeof(float);

// A lane has two channels of all tokens of 64 channels.
template <class Type, bool kIsForward> struct WritersOfBlock {
    using T = Type;
    using T2 = typename base_types::packing<T>::packed_type;

    // addresses in shared memory: rows of k or q, log gates, and where the product over the block goes
    uint32_t writers, gates, decay;
    int lane;
    float2 a[kBlock];
    T2 writer[kBlock];  // as loaded

    // The n-th token of the walk.
    static constexpr __device__ int token(int n) { return kIsForward ? n : kBlock - 1 - n; }
    // This lane's channels of a token.
    __device__ __forceinline__ uint32_t column_of(uint32_t rows, int t) const {
        return rows + ((4 * lane) ^ t % 8 * 16) + t * kRowBytes;
    }
    __device__ __forceinline__ uint32_t floats_of(uint32_t rows, int t) const {
        return rows + 8 * lane + t * kFloatRow;
    }

    // a = e^g of every token.
    __device__ __forceinline__ void load_gates(DType dtype) {
        if (dtype == DType::float32) {
            each<0, kBlock>([&](int t) { a[t] = load_floats(floats_of(gates, t)); });
        } else {
            const bool is_half = dtype == DType::float16;
            each<0, kBlock>(
                [&](int t) { a[t] = log_gates_of(load_word(gates + 4 * lane + t * kRowBytes), is_half); });
        }
        each<0, kBlock>([&](int t) { a[t] = gates_of(a[t]); });
        __syncwarp();  // low parts of other lanes go to the same place
    }

    // Scales the writers, high parts in place and low ones in the place of the gates. Returns the product
    // over the block, which it also stores.
    __device__ __forceinline__ float2 scale_writers(float scale) {
        each<0, kBlock>([&](int t) { writer[t] = load_pair_of<T2>(column_of(writers, t)); });
        float2 product{1.f, 1.f};
        each<0, kBlock>([&](int n) {
            const int t = kBlock - 1 - token(n);
            if constexpr (!kIsForward) product = product * a[t];
            const float2 by = kIsForward ? product : product * scale;
            const HighAndLow<T2> parts(to_float2(writer[t]) * by);
            store_pair_of(column_of(writers, t), parts.high);
            store_pair_of(column_of(gates, t), parts.low);
            if constexpr (kIsForward) product = product * a[t];
        });
        store_floats(decay + 8 * lane, product);
        return product;
    }
};

}  // namespace tfla_tk::channel_gate
