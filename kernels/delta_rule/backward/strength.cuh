// dbeta from the sums that the mirror leaves, one for every 16 columns of V.
#pragma once

#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

constexpr int kStrengthThreads = 256;

// A thread has a token of a head, and adds up its sums in their order.
static __global__ __launch_bounds__(kStrengthThreads) void delta_strength_kernel(
    const __grid_constant__ DeltaStrengthParams p) {
    const DeltaShape& s = p.shape;
    const int64_t heads = static_cast<int64_t>(s.batch) * s.heads, all = heads * s.seq;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kStrengthThreads + threadIdx.x;
    if (index >= all) return;
    float sum = p.sums[index];
#pragma unroll 4
    for (int part = 1; part < p.parts; part++) sum += p.sums[part * all + index];
    const int64_t token = index % s.seq, head = index / s.seq % s.heads, batch = index / s.seq / s.heads;
    store_gate(p.dbeta,
               batch * p.dbeta.batch_stride + head * p.dbeta.head_stride + token * p.dbeta.row_stride, sum);
}

inline void launch_strength(const DeltaStrengthParams& p, cudaStream_t stream) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_strength");
    const std::int64_t all = static_cast<std::int64_t>(s.batch) * s.heads * s.seq;
    const std::int64_t ctas = (all + kStrengthThreads - 1) / kStrengthThreads;
    launch<delta_strength_kernel>(p, grid_of(ctas, 1, "delta_strength"), kStrengthThreads, s.device, stream,
                                  "delta_strength");
}

}  // namespace tfla_tk::delta_rule
