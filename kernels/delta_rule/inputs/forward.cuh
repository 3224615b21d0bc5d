// The kernel in front of the forward: the inputs of the delta rule from raw ones.
#pragma once

#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

constexpr int kRowsOfLane = 2;  // of q, and as many of k, that a lane loads before it uses any

template <class T> __device__ inline uint4 scaled(const uint4& x, float factor) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    uint4 found;
    const T2* const given = reinterpret_cast<const T2*>(&x);
    T2* const rounded = reinterpret_cast<T2*>(&found);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 y = to_float2(given[n]);
        rounded[n] = from_float2<T2>({factor * y.x, factor * y.y});
    }
    return found;
}

template <class T, int kDimK> __device__ inline void normalise_rows(const DeltaInputsParams& p, int block) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    using Group = RowGroup<kDimK>;
    const Group group(p.shape);
    const int64_t first = static_cast<int64_t>(block) * (Group::kRows * kRowsOfLane) + Group::number();
    uint4 q[kRowsOfLane], k[kRowsOfLane];
#pragma unroll
    for (int n = 0; n < kRowsOfLane; n++) {
        const RowPlace place(p.shape, first + n * Group::kRows, group.column);
        q[n] = place.load<T>(p.q), k[n] = place.load<T>(p.k);
    }
#pragma unroll
    for (int n = 0; n < kRowsOfLane; n++) {
        const RowPlace place(p.shape, first + n * Group::kRows, group.column);
        const float of_q = rsqrtf(Group::sum(dot<T2>(q[n], q[n])) + kNormEps);
        const float of_k = rsqrtf(Group::sum(dot<T2>(k[n], k[n])) + kNormEps);
        place.store<T>(p.unit_q, scaled<T>(q[n], of_q));
        place.store<T>(p.unit_k, scaled<T>(k[n], of_k));
    }
}

__device__ inline void make_gates(const DeltaInputsParams& p) {
    const GateTile tile(p.shape);
    const HeadDecay decay(tile, p.shape, p.a_log, p.dt_bias);
    tile.for_tokens(p.shape, [&](int batch, int t, int64_t token) {
        const int64_t place = token * p.shape.heads + tile.head;
        if (p.strength != nullptr)
            p.strength[place] = (p.twice ? 2.f : 1.f) * Sigmoids(tile.load(p.beta, batch, t)).of;
        if (p.log_decay != nullptr)
            p.log_decay[place] = -decay.rate * softplus(tile.load(p.g, batch, t) + decay.bias);
    });
}

template <class T, int kDimK>
__global__ __launch_bounds__(kInputThreads) void delta_inputs_kernel(
    const __grid_constant__ InputsGlobals<DeltaInputsParams> g) {
    const int block = blockIdx.x;
    if (block < g.gate_blocks)
        make_gates(g.params);
    else
        normalise_rows<T, kDimK>(g.params, block - g.gate_blocks);
}

template <class T, int kDimK> void run_inputs(const DeltaInputsParams& p, cudaStream_t stream) {
    launch_inputs<delta_inputs_kernel<T, kDimK>, RowGroup<kDimK>::kRows * kRowsOfLane>(
        p, p.unit_q.data != nullptr, p.strength != nullptr || p.log_decay != nullptr, stream, "delta_inputs");
}

}  // namespace tfla_tk::delta_rule
