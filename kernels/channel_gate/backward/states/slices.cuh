// Slices of V. What readers see of the state, the products of values and the flow of gradient over an anchor
// are sums over V, so that launches one after the other may take 256 columns of V each. All but the last one
// leave these sums in fp32, every lane in its own place, and make no results. The next launch adds them to
// its own, before anything is rounded. The products are the same for all K, so the head's first CTA alone
// makes and leaves them.
#pragma once

#include "channel_gate/backward/states/config.cuh"

namespace tfla_tk::channel_gate {

// The sums of a block and 64 columns of K.
struct alignas(16) SumsOfBlock {
    float out[kBlock][kBlockChannels];  // as in StatesExchange
    float products[kBlock][kBlock];     // likewise; used where column is 0
    float2 flow[kBlockChannels / 2];    // over the block's end, where there is an anchor; by lane

    // column: of K
    __device__ static inline SumsOfBlock& of(const StatesGlobals& g, const StatesTask& task, int block,
                                             int column) {
        const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
        const int64_t place = head * g.block_slots + task.first_slot * kBlocks + block;
        return static_cast<SumsOfBlock*>(g.sums)[place * g.ctas + column / kWalkerColumns];
    }
};

// What an earlier launch has left of a block, lane by lane: two channels of every token, and eight products.
struct SumsOfLane {
    SumsOfBlock &sums, &of_head;  // of_head: where the products are

    __device__ static inline SumsOfLane of(const StatesGlobals& g, const StatesTask& task, int block) {
        return {SumsOfBlock::of(g, task, block, task.column), SumsOfBlock::of(g, task, block, 0)};
    }
    // Prefetches into L2 what is added later. has_flow: there is an anchor.
    __device__ __forceinline__ void prefetch(bool has_flow) const {
        prefetch_bytes<sizeof(sums.out)>(&sums.out);
        prefetch_bytes<sizeof(sums.products)>(&of_head.products);
        if (has_flow) prefetch_bytes<sizeof(sums.flow)>(&sums.flow);
    }
    // to: addresses in shared memory. NOTES: a few at a time, for want of registers.
    template <class C> __device__ __forceinline__ void add_out(uint32_t to) const {
        const int lane = fresh_laneid();
        constexpr int kTokens = 8;
#pragma unroll 1
        for (int first = 0; first < kBlock; first += kTokens) {
            float2 others[kTokens];
            each<0, kTokens>([&](int t) { others[t] = __ldcs(place_of_out(first + t)); });
            each<0, kTokens>([&](int t) {
                const uint32_t place = own_out<C>(to, first + t / 4 * 4, t % 4, lane);
                const float2 x = load_floats(place);
                store_floats(place, {x.x + others[t].x, x.y + others[t].y});
            });
        }
    }
    __device__ __forceinline__ void add_products(uint32_t to) const {
        each<0, 2>([&](int n) {
            const float4 others = __ldcs(place_of_products(n));
            float x[4];
            load_four(x, own_products(to, n));
            x[0] += others.x, x[1] += others.y, x[2] += others.z, x[3] += others.w;
            store_four(own_products(to, n), x);
        });
        __syncwarp();
    }
    // seen(first, i): what the reader of token first + i sees of the state.
    template <class Seen> __device__ __forceinline__ void leave_out(Seen seen) const {
#pragma unroll 1
        for (int first = 0; first < kBlock; first += 4)
            each<0, 4>([&](int i) { __stcs(place_of_out(first + i), seen(first, i)); });
    }
    __device__ __forceinline__ void leave_products(uint32_t products) const {
        each<0, 2>([&](int n) {
            float x[4];
            load_four(x, own_products(products, n));
            __stcs(place_of_products(n), {x[0], x[1], x[2], x[3]});
        });
    }

  private:
    __device__ __forceinline__ float2* place_of_out(int t) const {
        return reinterpret_cast<float2*>(&sums.out[t][2 * fresh_laneid()]);
    }
    __device__ __forceinline__ float4* place_of_products(int n) const {
        return reinterpret_cast<float4*>(&of_head.products[0][0]) + 32 * n + fresh_laneid();
    }
    static __device__ __forceinline__ uint32_t own_products(uint32_t products, int n) {
        return products + 512 * n + 16 * fresh_laneid();
    }
};

}  // namespace tfla_tk::channel_gate
