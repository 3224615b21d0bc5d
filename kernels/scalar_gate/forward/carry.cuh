// Between the segment sums and the fused kernel of a cut call: the state that arrives at each segment.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/forward/globals.cuh"
#include "sequence/carry.cuh"

namespace tfla_tk::mlstm {

// Turns the sums of the segments into the states that arrive at them, in place, from the first segment on:
//   m' = max(m + decay, own), C' = 2^{m + decay - m'} C + 2^{own - m'} C_own, n likewise.
// One thread carries 4 elements of one head through all segments of a sequence. Grid: x the heads of the
// sequences that find_carried finds, y blocks of elements.
__global__ __launch_bounds__(kCombineThreads) void mlstm_combine_kernel(
    const __grid_constant__ FwdWalkGlobals g) {
    TFLA_DEVICE_CODE {
        const int64_t state_size = static_cast<int64_t>(g.dim_qk) * g.dim_v;
        const int64_t all = state_size + g.dim_qk;  // elements of C, then of n
        const int head = blockIdx.x % g.heads;
        const auto [sequence, boundaries, first_slot] = find_carried(g.cut, g.seq, blockIdx.x / g.heads);
        const int64_t element = (static_cast<int64_t>(blockIdx.y) * kCombineThreads + threadIdx.x) * 4;
        if (boundaries <= 0 || element >= all) return;

        const bool of_c = element < state_size;
        const int64_t at = of_c ? element : element - state_size, stride = of_c ? state_size : g.dim_qk;
        const float* initial = of_c ? g.initial.c : g.initial.n;
        float* arriving = of_c ? g.workspace.arriving.c : g.workspace.arriving.n;
        const int64_t index = static_cast<int64_t>(sequence) * g.heads + head;

        float m = g.initial.m ? g.initial.m[index] : 0.f;  // natural log units, as it is stored
        float4 entering{0.f, 0.f, 0.f, 0.f};
        if (initial) entering = *reinterpret_cast<const float4*>(&initial[index * stride + at]);
        auto slot = [&, first = first_slot](int step) {
            return static_cast<int64_t>(first + step) * g.heads + head;
        };
        carry_over_boundaries(
            entering, boundaries,
            [&](int step) { return reinterpret_cast<float4*>(&arriving[slot(step) * stride + at]); },
            [&](int step) { return g.workspace.gates[slot(step)]; },
            [&](int step, double2 gates) {
                const double arrives = m * kLog2eDouble + gates.x;
                if (is_stabilised(g.gate_kind)) m = static_cast<float>(larger(arrives, gates.y) * kLn2);
                if (element == 0) g.workspace.arriving.m[slot(step)] = m;
                // relative to the rounded m that is stored, so that its rounding is no error
                return float2{exp2_of(arrives - m * kLog2eDouble), exp2_of(gates.y - m * kLog2eDouble)};
            });
    }
}

}  // namespace tfla_tk::mlstm
