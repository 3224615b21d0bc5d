// What the gradient of the log decay needs of the walks (scalar_gate/backward/gate_gradients.cuh): sums per
// token, their parts through the state, and the flow of gradient at the anchors.
//
// A flow is followed from an anchor by the parts through the state: what a chunk receives from S, and what it
// sends to dS. It then meets the flow at the next anchor, which is <S, dS> of the walked states. So these
// parts are summed with the operands that the states are made of, rounded alike: q and k as the right walk
// adds them to dS, and k as the left walk adds it to S. Else the differences of the roundings would add up.
#pragma once

#include "delta_rule/backward/token_sums.cuh"
#include "delta_rule/bindings/params_states.h"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// A lane's sum of products through the state, and of the squares of a part of them, which tell how much noise
// it has. kExact: also the sum without the rounding of the operands.
template <bool kExact> struct ThroughState {
    float value = 0.f, squares = 0.f, exact = 0.f;

    // Adds operand times result of a pair of tokens.
    __device__ inline void add(float2 operand, float2 rounded, float2 result, bool with_squares) {
        if (with_squares) {
            const float2 x{rounded.x * result.x, rounded.y * result.y};
            squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
        }
        value = fmaf(rounded.x, result.x, fmaf(rounded.y, result.y, value));
        if constexpr (kExact) exact = fmaf(operand.x, result.x, fmaf(operand.y, result.y, exact));
    }
    __device__ inline void pin() { asm volatile("" : "+f"(value), "+f"(squares), "+f"(exact)::"memory"); }
};

// Sums through the state, of a warp or of more.
struct SumsThroughState {
    FlowSum rounded;
    float rounding;  // rounded.value minus the same sum with exact operands

    template <bool kExact> __device__ static inline SumsThroughState of(const ThroughState<kExact>& lane) {
        const FlowSum rounded{warp_sum(lane.value), warp_sum(lane.squares)};
        return {rounded, kExact ? rounded.value - warp_sum(lane.exact) : 0.f};
    }
};

// Stores a chunk's sums over a part of the columns of K, by one warp. sums: of the lane's tokens. The gates'
// kernel adds the sum through the state to a flow and subtracts the tokens' sums from it, beginning with the
// last token. The sum through the state has rounded operands, those of tokens have exact ones; the
// difference is added to the last token's sum, so that it cancels.
template <class Globals, class Task>
__device__ inline void store_sums(const Globals& g, const Task& task, int chunk, int part,
                                  const SumsThroughState& through, const TwoSums& sums) {
    if (fresh_laneid() == 0) task.inter[part * g.chunk_sums + chunk] = through.rounded;
    const int tokens = task.tokens - chunk * kChunk, last = min(tokens, kChunk) - 1;
    auto corrected = [&](int token, float x) { return token == last ? x + through.rounding : x; };
    const float2 x{corrected(sums.token, sums.of.x), corrected(sums.token + 1, sums.of.y)};
    TwoSums{sums.token, x}.store(task.whole + part * g.rows + chunk * kChunk, tokens);
}

// Whether sums are wanted and there is an anchor before a chunk of the segment, or before the next segment.
template <class Task> __device__ inline bool is_anchor(const Task& task, int chunk) {
    static_assert(kSegmentChunks % kDeltaAnchorChunks == 0);
    return chunk >= task.first_anchor && chunk <= task.last_anchor && chunk % kDeltaAnchorChunks == 0;
}
// Units of 16 bytes of a part of an anchor: 16 rows of a state.
constexpr int anchor_units_of(int dim_v) { return dim_v / 16 * 32; }

// The number of a part of an anchor, among those of the head.
template <class Globals, class Task>
__device__ inline int anchor_part(const Globals& g, const Task& task, int chunk, int part) {
    return (task.first_slot + chunk) / kDeltaAnchorChunks * g.parts() + part;
}

// A lane's units of a part of an anchor, of 16 columns of V and the warp's 16 of K each, 32 apart.
template <class C, class Task>
__device__ inline uint4* anchor_units(const Task& task, int anchor_part, int lane) {
    return task.anchors + static_cast<int64_t>(anchor_part) * C::kAnchorUnits + lane;
}

template <class C, class Fragment, int kCount>
__device__ inline void store_anchor(uint4* units, const Fragment (&state)[kCount]) {
    each<0, C::kDimV / 16>(
        [&](int k) { units[32 * k] = reinterpret_cast<const uint4&>(state[k].tiles[0][0].data); });
}

// Asks for a part of an anchor to be in L2, by lines of 128 bytes, one for a lane.
template <class C, class Task>
__device__ inline void prefetch_anchor(const Task& task, int anchor_part, int lane) {
    constexpr int kLineUnits = 8;
    static_assert(C::kAnchorUnits <= 32 * kLineUnits);
    if (lane * kLineUnits < C::kAnchorUnits)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(anchor_units<C>(task, anchor_part, lane * kLineUnits)));
}

// The sums over an anchor's part, which the other walk has left, times the state or gradient of this one in
// fp32, and times the same rounded to A operands, the same in all lanes.
template <class C, class State, class Fragment, int kCount>
__device__ inline float2 anchor_flows(const uint4* units, const State& state,
                                      const Fragment (&rounded)[kCount]) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    float2 sums{0.f, 0.f};
    each<0, C::kDimV / 16>([&](int k) {
        const uint4 unit = units[32 * k];
        const auto* pairs = reinterpret_cast<const T2*>(&unit);
        each<0, 4>([&](int n) {
            const float2 x = to_float2(pairs[n]), y = state.tiles[0][k].data[n];
            const float2 z = to_float2(rounded[k].tiles[0][0].data[n]);
            sums = {fmaf(x.x, y.x, fmaf(x.y, y.y, sums.x)), fmaf(x.x, z.x, fmaf(x.y, z.y, sums.y))};
        });
    });
    return {warp_sum(sums.x), warp_sum(sums.y)};
}

}  // namespace tfla_tk::delta_rule
