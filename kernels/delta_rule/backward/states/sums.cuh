// What the gradient of the log decay needs of the walks (scalar_gate/backward/gate_gradients.cuh): sums per
// token, their parts through the state, and the flow of gradient at the anchors.
#pragma once

#include "delta_rule/backward/states/config.cuh"
#include "delta_rule/backward/token_sums.cuh"

namespace tfla_tk::delta_rule {

// A lane's sum of products through the state, and of their squares, which tell how much noise it has.
struct ThroughState {
    float value = 0.f, squares = 0.f;

    // product(j, k): of what this lane has in data[k] of the j-th 16 tokens.
    template <class Product> __device__ inline void add(Product product) {
        each<0, kChunk / 4>([&](int i) {
            const float2 x = product(i / 4, i % 4);
            value += x.x + x.y;
            squares += x.x * x.x + x.y * x.y;
        });
    }
};

// Stores a chunk's sums of one warp, which are those of a part of 16 columns of K.
template <class Product>
__device__ inline void store_sums(const StatesGlobals& g, const StatesTask& task, int chunk, int part,
                                  int lane, const ThroughState& through, Product product) {
    store_token_sums(task.whole + part * g.rows + chunk * kChunk, task.tokens - chunk * kChunk, lane, product,
                     [](int) { return 1.f; });
    const float value = warp_sum(through.value), squares = warp_sum(through.squares);
    if (lane == 0) task.inter[part * g.chunk_sums + chunk] = {value, squares};
}

// Whether sums are wanted and there is an anchor before a chunk of the segment, or before the next segment.
__device__ inline bool is_anchor(const StatesTask& task, int chunk) {
    static_assert(kSegmentChunks % kAnchorChunks == 0);
    return chunk >= task.first_anchor && chunk <= task.last_anchor && chunk % kAnchorChunks == 0;
}
// The number of a part of an anchor, among those of the head.
__device__ inline int anchor_part(const StatesGlobals& g, const StatesTask& task, int chunk, int part) {
    return (task.first_slot + chunk) / kAnchorChunks * g.parts() + part;
}

// A lane's units of a part of an anchor, of 16 columns of V and the warp's 16 of K each, 32 apart.
template <class C> __device__ inline uint4* anchor_units(const StatesTask& task, int anchor_part, int lane) {
    return task.anchors + static_cast<int64_t>(anchor_part) * C::kAnchorUnits + lane;
}

template <class C, class Fragment, int kCount>
__device__ inline void store_anchor(uint4* units, const Fragment (&state)[kCount]) {
    each<0, C::kDimV / 16>(
        [&](int k) { units[32 * k] = reinterpret_cast<const uint4&>(state[k].tiles[0][0].data); });
}

// The sum over an anchor's part times the state's gradient, the same in all lanes.
template <class C, class State>
__device__ inline float anchor_flow(const uint4* units, const State& gradient) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    float sum = 0.f;
    each<0, C::kDimV / 16>([&](int k) {
        const uint4 unit = units[32 * k];
        const auto* pairs = reinterpret_cast<const T2*>(&unit);
        each<0, 4>([&](int n) {
            const float2 x = to_float2(pairs[n]), y = gradient.tiles[0][k].data[n];
            sum += x.x * y.x + x.y * y.y;
        });
    });
    return warp_sum(sum);
}

}  // namespace tfla_tk::delta_rule
