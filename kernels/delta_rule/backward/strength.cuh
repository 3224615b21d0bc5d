// dbeta from the sums that the mirror leaves, one for every 16 columns of V.
#pragma once

#include "delta_rule/inputs/common.cuh"

namespace tfla_tk::delta_rule {

constexpr int kStrengthThreads = 256;

// A thread has a token of a head, and adds up its sums in their order.
static __global__ __launch_bounds__(kStrengthThreads) void delta_strength_kernel(
    const __grid_constant__ DeltaStrengthParams p) {
    const DeltaShape& s = p.shape;
    const int tiles = (s.seq + kStrengthThreads - 1) / kStrengthThreads;
    const int token = blockIdx.x % tiles * kStrengthThreads + threadIdx.x;
    if (token >= s.seq) return;
    const int batch_head = blockIdx.x / tiles, head = batch_head % s.heads, batch = batch_head / s.heads;
    const int64_t all = static_cast<int64_t>(s.batch) * s.heads * s.seq;
    const float* const sums = p.sums + static_cast<int64_t>(batch_head) * s.seq + token;
    float sum = sums[0];
#pragma unroll 8
    for (int part = 1; part < p.parts; part++) sum += sums[part * all];
    store_gate(p.dbeta,
               batch * p.dbeta.batch_stride + head * p.dbeta.head_stride + token * p.dbeta.row_stride, sum);
}

inline void launch_strength(const DeltaStrengthParams& p, cudaStream_t stream) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_strength");
    const std::int64_t tiles = (s.seq + kStrengthThreads - 1) / kStrengthThreads;
    const std::int64_t ctas = tiles * s.batch * s.heads;
    launch<delta_strength_kernel>(p, grid_of(ctas, 1, "delta_strength"), kStrengthThreads, s.device, stream,
                                  "delta_strength");
}

}  // namespace tfla_tk::delta_rule
