// The flow of gradient over a token's end, <S, dS> per channel of K: the sum of q dq - k dk behind that
// token, without what has come together on the way. At the anchors the left walk leaves S in two parts, in
// the order in which the right walk's warps have dS.
#pragma once

#include "channel_gate/backward/states/config.cuh"

namespace tfla_tk::channel_gate {

constexpr int kAnchorUnits =
    2 * 32;  // of 16 columns of V and 16 of K: high and low parts, a unit per lane each

// A lane's first unit of an anchor's part, of the warp's 16 columns of K. The anchor is before `block`; units
// of columns of V before those of `walker` come first.
template <class C>
__device__ inline uint4* anchor_units(const StatesGlobals& g, const StatesTask& task, int block, int part,
                                      int walker) {
    const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
    const int anchor = (task.first_slot + block / kBlocks) / kAnchorChunks;
    const int64_t place = (head * g.anchor_slots + anchor) * g.parts() + part;
    const int64_t tiles = place * (C::kDimV / 16) + C::part_of(walker) * (C::kWalkerV / 16);
    return g.anchors + tiles * kAnchorUnits + fresh_laneid();
}

// Prefetches these units into L2. NOTES: else a walker waits for global memory three times, and all other
// warps wait for the walker.
template <class C> __device__ inline void prefetch_anchor(const uint4* units) {
    prefetch_bytes<C::kWalkerV / 16 * kAnchorUnits * sizeof(uint4)>(units - fresh_laneid());
}

template <class C, class State> __device__ inline void store_anchor(uint4* units, const State& state) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    each<0, State::width>([&](int k) {
        T2 high[4], low[4];
        each<0, 4>([&](int n) {
            const HighAndLow<T2> parts(state.tiles[0][k].data[n]);
            high[n] = parts.high, low[n] = parts.low;
        });
        units[kAnchorUnits * k] = reinterpret_cast<const uint4&>(high);
        units[kAnchorUnits * k + 32] = reinterpret_cast<const uint4&>(low);
    });
}

// A warp's 16 flows, from an anchor's part and the state's gradient, to shared memory.
template <class C, class State>
__device__ inline void store_flow(const uint4* units, const State& gradient, float* flow) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    float sums[2] = {0.f, 0.f};
    each<0, State::width>([&](int k) {
        const uint4 units_of_tile[2] = {units[kAnchorUnits * k], units[kAnchorUnits * k + 32]};
        const auto* high = reinterpret_cast<const T2*>(units_of_tile);
        each<0, 4>([&](int n) {
            const float2 x = to_float2(high[n]), rest = to_float2(high[4 + n]),
                         y = gradient.tiles[0][k].data[n];
            sums[n % 2] += (x.x + rest.x) * y.x + (x.y + rest.y) * y.y;
        });
    });
    const int lane = fresh_laneid();
    each<0, 2>([&](int n) {
        const float sum = quad_sum(sums[n]);
        if (lane % 4 == 0) flow[lane / 4 + 8 * n] = sum;
    });
}

// A warp's 16 flows over its segment's end, from S and dS there [K, V]: put(n, sum) of rows lane / 4 and + 8.
// The left walk has S and reads dS, the right one has dS and reads S. NOTES: the right walk's readers see dS
// in two parts, and so do these: behind closed gates nothing is left of the two.
template <class C, class State, class Put>
__device__ inline void put_last_flow(const StatesGlobals& g, const State& state, const float* other,
                                     int column, int value_column, Put put) {
    using T2 = typename base_types::packing<typename C::T>::packed_type;
    float sums[2] = {0.f, 0.f};
    const int lane = fresh_laneid(), row = column + lane / 4;
    each<0, 4 * State::width>([&](int i) {
        const int n = i % 2, r = row + 8 * n, c = value_column + i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
        if (r >= g.dim_k || c >= g.dim_v) return;
        const float2 own = state.tiles[0][i / 4].data[i % 4];
        const float2 read =
            *reinterpret_cast<const float2*>(&other[static_cast<int64_t>(r) * g.row_of_state + c]);
        const float2 x = C::kIsLeft ? own : read;
        const HighAndLow<T2> parts(C::kIsLeft ? read : own);
        const float2 high = to_float2(parts.high), low = to_float2(parts.low);
        sums[n] += x.x * (high.x + low.x) + x.y * (high.y + low.y);
    });
    each<0, 2>([&](int n) {
        const float sum = quad_sum(sums[n]);
        if (lane % 4 == 0) put(n, sum);
    });
}

// Over the sequence's end, by the left walk. Two walkers that split V add up their parts.
template <class C, class State>
__device__ inline void store_last_flow(const StatesGlobals& g, StatesMemory<C>& smem, const State& state,
                                       int walker, int column, int value_column) {
    const StatesTask& task = smem.task;
    const float* const gradient = g.d_last + task.state * static_cast<int64_t>(g.dim_k) * g.row_of_state;
    const int row = column + fresh_laneid() / 4;
    auto store = [&](int n, float sum) {
        if (row + 8 * n >= g.dim_k) return;
        float& flow = g.flows[task.state * g.dim_k + row + 8 * n];
        flow = g.template adds<C>() ? flow + sum : sum;
    };
    if constexpr (C::kSplitsV) {
        const int place = row - task.column;
        put_last_flow<C>(g, state, gradient, column, value_column,
                         [&](int n, float sum) { smem.exchange.flow[walker][place + 8 * n] = sum; });
        named_sync<256>(NamedBarrier::columns);
        if (walker != 0 || fresh_laneid() % 4 != 0) return;
        each<0, 2>([&](int n) {
            const auto& flow = smem.exchange.flow;
            store(n, flow[0][place + 8 * n] + flow[1][place + 8 * n]);
        });
    } else {
        put_last_flow<C>(g, state, gradient, column, value_column, store);
    }
}

}  // namespace tfla_tk::channel_gate
