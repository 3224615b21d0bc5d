// The kernel in front of the forward: the inputs of the delta rule from raw ones.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

template <class T, int kDimK> __device__ inline void normalise_rows(const DeltaInputsParams& p, int block) {
    using Lane = Row<T, kDimK>;
    const Lane row(p.shape, block);
    const LaneUnits q = row.load(p.q), k = row.load(p.k);
    auto normalised = [](const LaneUnits& x) {
        const float r = rsqrtf(Lane::dot_product(x, x) + kNormEps);
        return Lane::map(x, x, [&](float2 x, float2) { return float2{r * x.x, r * x.y}; });
    };
    row.store(p.unit_q, normalised(q));
    row.store(p.unit_k, normalised(k));
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
    TFLA_DEVICE_CODE {
        const int block = blockIdx.x;
        if (block < g.gate_blocks)
            make_gates(g.params);
        else
            normalise_rows<T, kDimK>(g.params, block - g.gate_blocks);
    }
}

}  // namespace tfla_tk::delta_rule
