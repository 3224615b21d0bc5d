// Slices of V. What readers see of the state, the products of values and the flow of gradient over an anchor
// are sums over V, so that launches one after the other may take 256 columns of V each. All but the last one
// leave these sums in fp32, every lane in its own place, and make no results. The next launch adds them to
// its own, before anything is rounded.
#pragma once

#include "channel_gate/backward/states/config.cuh"

namespace tfla_tk::channel_gate {

// Of a block and 64 columns of K.
struct alignas(16) SumsOfBlock {
    float out[kBlock][kBlockChannels];  // as in StatesExchange
    float products[kBlock][kBlock];     // likewise
    float2 flow[kBlockChannels / 2];    // over the block's end, where there is an anchor; by lane

    __device__ static inline SumsOfBlock& of(const StatesGlobals& g, const StatesTask& task, int block) {
        const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
        const int64_t place = head * g.block_slots + task.first_slot * kBlocks + block;
        return static_cast<SumsOfBlock*>(g.sums)[place * g.ctas + task.column / kWalkerColumns];
    }
};

// A lane's part of the sums of a block: its two channels of every token, and eight products.
struct SumsOfLane {
    float2 out[kBlock];
    float4 products[2];

    __device__ __forceinline__ void load(const SumsOfBlock& sums) {
        each<0, kBlock>([&](int t) { out[t] = __ldcs(place_of_out(sums, t)); });
        each<0, 2>([&](int n) { products[n] = __ldcs(place_of_products(sums, n)); });
    }
    // from: addresses of out and products in shared memory.
    __device__ __forceinline__ void add_out(uint32_t to) const {
        each<0, kBlock>([&](int t) {
            const float2 x = load_floats(own_out(to, t));
            store_floats(own_out(to, t), {x.x + out[t].x, x.y + out[t].y});
        });
    }
    __device__ __forceinline__ void add_products(uint32_t to) const {
        each<0, 2>([&](int n) {
            float x[4];
            load_four(x, own_products(to, n));
            x[0] += products[n].x, x[1] += products[n].y, x[2] += products[n].z, x[3] += products[n].w;
            store_four(own_products(to, n), x);
        });
        __syncwarp();
    }
    __device__ static __forceinline__ void leave(SumsOfBlock& sums, uint32_t out, uint32_t products) {
        each<0, kBlock>([&](int t) { __stcs(place_of_out(sums, t), load_floats(own_out(out, t))); });
        each<0, 2>([&](int n) {
            float x[4];
            load_four(x, own_products(products, n));
            __stcs(place_of_products(sums, n), {x[0], x[1], x[2], x[3]});
        });
    }

  private:
    template <class To, class From> static __device__ __forceinline__ To* as(From& x) {
        return reinterpret_cast<To*>(const_cast<float*>(&x));
    }
    static __device__ __forceinline__ float2* place_of_out(const SumsOfBlock& sums, int t) {
        return as<float2>(sums.out[t][2 * fresh_laneid()]);
    }
    static __device__ __forceinline__ float4* place_of_products(const SumsOfBlock& sums, int n) {
        return as<float4>(sums.products[0][0]) + 32 * n + fresh_laneid();
    }
    static __device__ __forceinline__ uint32_t own_out(uint32_t rows, int t) {
        return rows + t * (kOutRow * 4) + 8 * fresh_laneid();
    }
    static __device__ __forceinline__ uint32_t own_products(uint32_t products, int n) {
        return products + 512 * n + 16 * fresh_laneid();
    }
};

}  // namespace tfla_tk::channel_gate
