// Between the segment sums of the backward and its walks: the state, or its gradient, that arrives at each
// boundary.
#pragma once

#include "common/kernel.cuh"
#include "kittens.cuh"
#include "scalar_gate/bindings/params_backward.h"
#include "scalar_gate/gate/gates.cuh"
#include "sequence/carry.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::mlstm {

// In place, along the walk of a sequence: X' = 2^log2_decay X + own, where X' arrives at the boundary. The
// stabilisers at the boundaries are known, so there is no running maximum as in the forward's combine. One
// thread carries 4 elements of one head over all boundaries of a sequence. Grid: x the heads of the sequences
// that find_carried finds, y blocks of elements.
__global__ __launch_bounds__(kCombineThreads) void mlstm_bwd_combine_kernel(
    const __grid_constant__ MlstmBwdCombineParams g) {
    TFLA_DEVICE_CODE {
        const int64_t state_size = static_cast<int64_t>(g.dim_qk) * g.dim_v;
        const int head = blockIdx.x % g.heads;
        const auto [sequence, count, first_slot] = find_carried(g.cut, g.seq, blockIdx.x / g.heads);
        const int64_t element = (static_cast<int64_t>(blockIdx.y) * kCombineThreads + threadIdx.x) * 4;
        const bool exists = element < state_size + g.norm_parts * g.dim_qk;  // of c, then of n
        if (count <= 0 || !exists) return;

        const int64_t index = static_cast<int64_t>(sequence) * g.heads + head;
        float* boundaries = g.boundaries.c + element;
        int64_t stride = state_size;  // from slot to slot
        float4 entering{0.f, 0.f, 0.f, 0.f};
        if (element < state_size) {
            if (g.entering_c)
                entering = *reinterpret_cast<const float4*>(&g.entering_c[index * state_size + element]);
        } else {
            const int64_t slots = static_cast<int64_t>(g.cut.segments - g.cut.sequences) * g.heads;
            const int part = static_cast<int>(element - state_size) / g.dim_qk;
            const int at = static_cast<int>(element - state_size) % g.dim_qk;
            boundaries = g.boundaries.n + part * slots * g.dim_qk + at;
            stride = g.dim_qk;
            if (g.entering_n && part == 0)
                entering = *reinterpret_cast<const float4*>(&g.entering_n[index * g.dim_qk + at]);
        }
        auto slot = [&, first = first_slot, last = first_slot + count - 1](int step) {
            return static_cast<int64_t>(g.backward ? last - step : first + step) * g.heads + head;
        };
        carry_over_boundaries(
            entering, count,
            [&](int step) { return reinterpret_cast<float4*>(&boundaries[slot(step) * stride]); },
            [&](int step) { return g.boundaries.log2_decay[slot(step)]; },
            [](int, double log2_decay) { return float2{exp2_of(log2_decay), 1.f}; });
    }
}

}  // namespace tfla_tk::mlstm
