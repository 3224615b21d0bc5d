// Anchors of the mLSTM backward's passes. Before every eighth chunk dq stores its state in global memory, as
// the next GEMM reads it, and n. dk's state there is the gradient of that state and lies in the same threads:
// it sums the product, which is the exact flow over that boundary (gate_gradients.cuh).
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// A thread's units of an anchor, of 16 columns of the state each and kAnchorStride apart; and n of the slice.
// NOTES: two functions, so that neither address takes registers while the other is used.
template <class C> constexpr int kAnchorStride = 128 * C::kStateWarpgroups;
template <class C>
__device__ inline auto* anchor_units(const PassGlobals& g, const PassTask& task, int chunk) {
    constexpr int kFirstThread = 256;  // of the state's
    return reinterpret_cast<typename C::AnchorUnit*>(task.anchor_memory<C>(g, chunk)) + fresh_thread() -
           kFirstThread;
}
template <class C>
__device__ inline float* anchor_norm(const PassGlobals& g, const PassTask& task, int chunk) {
    constexpr int64_t kStateBytes = static_cast<int64_t>(C::kSlice) * C::kDimKeys * sizeof(typename C::T);
    return reinterpret_cast<float*>(task.anchor_memory<C>(g, chunk) + kStateBytes);
}

// Stores the state, rounded as an operand. norm_row: the first that this lane has of n.
template <class C, class State, class NormRow>
__device__ inline void store_anchor(const PassGlobals& g, const PassTask& task, int chunk,
                                    const State (&state)[C::kParts], const typename C::Norm& norm,
                                    NormRow norm_row) {
    auto* units = anchor_units<C>(g, task, chunk);
#pragma unroll
    for (int k = 0; k < C::kParts * State::width; k++) {
        rt<typename C::T, 16, 16> a;
        convert_fragment(a, state[k / State::width], k % State::width);
        *units = reinterpret_cast<const typename C::AnchorUnit&>(a.tiles[0][0].data);
        units += kAnchorStride<C>;
        asm volatile("" ::: "memory");  // NOTES: one unit at a time: registers
    }
    if (!C::kNormalizer || fresh_laneid() % 4 != 0) return;
    float* rows = anchor_norm<C>(g, task, chunk) + norm_row();
    rows[0] = norm.row(0), rows[8] = norm.row(1);
}

// This lane's part of the product of an anchor's unit with 16 columns of the state.
template <class T, class Unit, class Subtile>
__device__ inline float anchor_unit_dot(const Unit& unit, const Subtile& columns) {
    const auto* pairs = reinterpret_cast<const typename rt<T, 16, 16>::dtype*>(&unit);
    float sum = 0.f;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const float2 stored = to_float2(pairs[pair]), own = columns.data[pair];
        sum += stored.x * own.x + stored.y * own.y;
    }
    return sum;
}

// This warp's part of the sum over an anchor times the state and n, the same in all lanes.
template <class C, class State, class NormRow>
__device__ inline float anchor_dot(const PassGlobals& g, const PassTask& task, int chunk,
                                   const State (&state)[C::kParts], const typename C::Norm& norm,
                                   NormRow norm_row) {
    using Unit = typename C::AnchorUnit;
    constexpr int kUnits = C::kParts * State::width, kAhead = 4, kStride = kAnchorStride<C>;
    const Unit* units = anchor_units<C>(g, task, chunk);
    Unit ahead[kAhead];  // units in flight
#pragma unroll
    for (int k = 0; k < kAhead; k++) ahead[k] = units[k * kStride];
    float sum = 0.f;
    if (C::kNormalizer && fresh_laneid() % 4 == 0) {
        const float* rows = anchor_norm<C>(g, task, chunk) + norm_row();
        sum += rows[0] * norm.row(0) + rows[8] * norm.row(1);
    }
#pragma unroll
    for (int k = 0; k < kUnits; k++) {
        const auto& columns = state[k / State::width].tiles[0][k % State::width];
        sum += anchor_unit_dot<typename C::T>(ahead[k % kAhead], columns);
        asm volatile("" ::: "memory");  // NOTES: no more units at a time: registers
        if (k + kAhead < kUnits) ahead[k % kAhead] = units[(k + kAhead) * kStride];
    }
    return warp_sum(sum);
}

}  // namespace tfla_tk::mlstm
