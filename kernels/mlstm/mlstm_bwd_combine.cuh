// Between the segments kernels of the mLSTM backward and its passes: what arrives at each boundary.
#pragma once

#include "kittens.cuh"
#include "tfla_tk/gates.cuh"
#include "tfla_tk/params_bwd.h"
#include "tfla_tk/segments.cuh"

namespace tfla_tk::mlstm {

constexpr int kBwdCombineThreads = 256;

// In place, along the walk of a sequence: X' = 2^log2_decay X + own, X' being what arrives at a boundary. The
// stabilisers at the boundaries are given, so no maximum runs along as it does in the forward's combine. One
// thread carries 4 elements of one head over all boundaries of a sequence.
__global__ __launch_bounds__(kBwdCombineThreads) void mlstm_bwd_combine_kernel(
    const __grid_constant__ MlstmBwdCombineParams g) {
    constexpr int kInFlight = 4;  // boundaries whose loads are
    const int64_t state_size = static_cast<int64_t>(g.dim_qk) * g.dim_v;
    const int number = blockIdx.x / g.heads, head = blockIdx.x % g.heads;
    const Segment segment = find_segment(g.cut, g.seq, number);
    const int64_t element = (static_cast<int64_t>(blockIdx.y) * kBwdCombineThreads + threadIdx.x) * 4;
    const bool exists = element < state_size + g.norm_parts * g.dim_qk;  // of c, then of n
    if (segment.tokens < 0 || segment.number != 0 || segment.count == 1 || !exists) return;

    const int64_t index = static_cast<int64_t>(segment.sequence) * g.heads + head;
    float* boundaries = g.boundaries.c + element;
    int64_t stride = state_size;  // from slot to slot
    float4 sum{0.f, 0.f, 0.f, 0.f};
    if (element < state_size) {
        if (g.entering_c) sum = *reinterpret_cast<const float4*>(&g.entering_c[index * state_size + element]);
    } else {
        const int64_t slots = static_cast<int64_t>(g.cut.segments - g.cut.sequences) * g.heads;
        const int part = static_cast<int>(element - state_size) / g.dim_qk;
        const int at = static_cast<int>(element - state_size) % g.dim_qk;
        boundaries = g.boundaries.n + part * slots * g.dim_qk + at;
        stride = g.dim_qk;
        if (g.entering_n && part == 0)
            sum = *reinterpret_cast<const float4*>(&g.entering_n[index * g.dim_qk + at]);
    }
    const int count = segment.count - 1;
    const int64_t first = static_cast<int64_t>(number - segment.sequence) * g.heads + head;
    auto slot = [&](int step) {
        return first + static_cast<int64_t>(g.backward ? count - 1 - step : step) * g.heads;
    };
    for (int base = 0; base < count; base += kInFlight) {
        float4 own[kInFlight];
        float decay[kInFlight];
#pragma unroll
        for (int n = 0; n < kInFlight; n++)
            if (base + n < count) {
                own[n] = *reinterpret_cast<const float4*>(&boundaries[slot(base + n) * stride]);
                decay[n] = exp2_of(g.boundaries.log2_decay[slot(base + n)]);
            }
#pragma unroll
        for (int n = 0; n < kInFlight; n++)
            if (base + n < count) {
                sum = {decay[n] * sum.x + own[n].x, decay[n] * sum.y + own[n].y, decay[n] * sum.z + own[n].z,
                       decay[n] * sum.w + own[n].w};
                *reinterpret_cast<float4*>(&boundaries[slot(base + n) * stride]) = sum;
            }
    }
}

}  // namespace tfla_tk::mlstm
