// The kernel behind the backward: the gradients of the raw inputs.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

template <class T, int kDimK>
__device__ inline void differentiate_rows(const DeltaInputsBackwardParams& p, int block) {
    using Lane = Row<T, kDimK>;
    const Lane row(p.shape, block);
    const LaneUnits q = row.load(p.q), dq = row.load(p.dq);
    const LaneUnits k = row.load(p.k), dk = row.load(p.dk);
    auto gradient = [](const LaneUnits& x, const LaneUnits& dy) {
        const float r = rsqrtf(Lane::dot_product(x, x) + kNormEps);
        const float along = r * (r * Lane::dot_product(x, dy));
        return Lane::map(x, dy, [&](float2 x, float2 dy) {
            return float2{r * (dy.x - along * x.x), r * (dy.y - along * x.y)};
        });
    };
    row.store(p.dq, gradient(q, dq));
    row.store(p.dk, gradient(k, dk));
}

// Adds the warps' sums in their order, and leaves those of the block.
__device__ inline void write_sums(const DeltaInputsBackwardParams& p, const GateTile& tile, float2 own) {
    __shared__ float2 of_warps[kInputWarps][kGateHeads];
    of_warps[threadIdx.x / 32][threadIdx.x % 32] = own;
    __syncthreads();
    if (threadIdx.x >= kGateHeads || tile.head >= p.shape.heads) return;
    float2 sum{0.f, 0.f};
#pragma unroll
    for (int warp = 0; warp < kInputWarps; warp++) {
        const float2 x = of_warps[warp][threadIdx.x];
        sum.x += x.x, sum.y += x.y;
    }
    const int64_t tokens = static_cast<int64_t>(p.shape.batch) * p.shape.seq;
    const int64_t parts = (tokens + kInputTokens - 1) / kInputTokens;
    const int64_t place = static_cast<int64_t>(tile.part) * p.shape.heads + tile.head;
    p.sums[place] = sum.x, p.sums[parts * p.shape.heads + place] = sum.y;
}

__device__ inline void differentiate_gates(const DeltaInputsBackwardParams& p) {
    const GateTile tile(p.shape);
    const HeadDecay decay(tile, p.shape, p.a_log, p.dt_bias);
    float2 sum{0.f, 0.f};  // for A_log and for dt_bias
    tile.for_tokens(p.shape, [&](int batch, int t, int64_t token) {
        const int64_t place = token * p.shape.heads + tile.head;
        if (p.d_strength != nullptr) {
            const Sigmoids s(tile.load(p.beta, batch, t));
            const float slope = (p.twice ? 2.f : 1.f) * s.of * s.of_minus;
            store_gate(p.d_beta, batch, tile.head, t, p.d_strength[place] * slope);
        }
        if (p.d_log_decay != nullptr) {
            const float x = tile.load(p.g, batch, t) + decay.bias, gradient = p.d_log_decay[place];
            // the rate times the gradient alone may overflow
            const float d_g = gradient * (-decay.rate * Sigmoids(x).of);
            sum.x += gradient * (-decay.rate * softplus(x)), sum.y += d_g;
            store_gate(p.d_g, batch, tile.head, t, d_g);
        }
    });
    if (p.sums != nullptr) write_sums(p, tile, sum);
}

template <class T, int kDimK>
__global__ __launch_bounds__(kInputThreads) void delta_inputs_backward_kernel(
    const __grid_constant__ InputsGlobals<DeltaInputsBackwardParams> g) {
    TFLA_DEVICE_CODE {
        const int block = blockIdx.x;
        if (block < g.gate_blocks)
            differentiate_gates(g.params);
        else
            differentiate_rows<T, kDimK>(g.params, block - g.gate_blocks);
    }
}

}  // namespace tfla_tk::delta_rule
