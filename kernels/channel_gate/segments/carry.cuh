// Turns the sums of the segments into the states at the borders between them.
#pragma once

#include "channel_gate/segments/params.cuh"
#include "common/kernel.cuh"
#include "sequence/carry.cuh"

namespace tfla_tk::channel_gate {

// In place, from the sequence's begin on, backward in time from its end on:
//   S = decay S + sum
// per channel of K. One thread carries four elements of a row of one head over all borders of a sequence.
// Grid: x the heads of the sequences that find_carried finds, y blocks of elements.
template <bool kBackward>
__global__ __launch_bounds__(kCombineThreads) void gla_carry_kernel(
    const __grid_constant__ SegmentsGlobals g) {
    TFLA_DEVICE_CODE {
        const int64_t state_size = static_cast<int64_t>(g.dim_k) * g.dim_v;
        const int head = blockIdx.x % g.heads;
        const auto [sequence, borders, first_slot] = find_carried(g.cut, g.seq, blockIdx.x / g.heads);
        const int64_t element = (static_cast<int64_t>(blockIdx.y) * kCombineThreads + threadIdx.x) * 4;
        if (borders <= 0 || element >= state_size) return;

        const int row = static_cast<int>(element / g.dim_v);
        float4 entering{0.f, 0.f, 0.f, 0.f};
        if (g.entering) {
            const int64_t at = (static_cast<int64_t>(sequence) * g.heads + head) * state_size + element;
            entering = *reinterpret_cast<const float4*>(&g.entering[at]);
        }
        auto slot = [&, first = first_slot, count = borders](int step) {
            return static_cast<int64_t>(first + (kBackward ? count - 1 - step : step)) * g.heads + head;
        };
        carry_over_boundaries(
            entering, borders,
            [&](int step) {
                return reinterpret_cast<float4*>(&g.borders[slot(step) * state_size + element]);
            },
            [&](int step) { return g.decays[slot(step) * g.dim_k + row]; },
            [&](int, float decay) { return float2{decay, 1.f}; });
    }
}

}  // namespace tfla_tk::channel_gate
