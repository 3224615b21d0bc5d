// The gradient of the log decay from what the walk for dq, dk and dV leaves. With S the state that enters a
// chunk, dS the gradient of the one that leaves it, c = k.right as far as it goes through dS, and d = q.dq +
// k.left - k.right, both of a token:
//
//     dg_t = e^{b_L} <S, dS> + sum of c over the chunk + sum_{u >= t} d_u
//
// The first two are <S, dS> behind the chunk. NOTES: not of the state there, which is rounded anew: here what
// goes through dS from tokens behind t cancels, and so does what flows between them, since the walk makes the
// scores once for all sums. All that is left may be far smaller.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/inputs/common.cuh"
#include "scalar_gate/backward/gate_gradients.cuh"
#include "scalar_gate/gate/policy.cuh"

namespace tfla_tk::delta_rule {

constexpr int kDecayThreads = 32 * kDecayChunks;

// A CTA has a segment of a head, a warp a chunk of it.
__global__ __launch_bounds__(kDecayThreads) void delta_decay_kernel(
    const __grid_constant__ DeltaDecayParams p) {
    TFLA_DEVICE_CODE {
        const DeltaShape& shape = p.shape;
        const bool packed = shape.cut.offsets != nullptr;
        const int head = blockIdx.x % shape.heads;
        const Segment segment = find_segment(shape.cut, shape.seq, blockIdx.x / shape.heads);
        const int chunk = threadIdx.x / 32, first_row = segment.first_row + chunk * kChunk;
        const int tokens = segment.tokens - chunk * kChunk;
        if (tokens <= 0) return;
        const int batch = packed ? 0 : segment.sequence;
        const int64_t heads = static_cast<int64_t>(shape.batch) * shape.heads,
                      of_head = batch * shape.heads + head;
        const int slots = p.slots;
        const int slot = segment.first_row / kChunk + chunk + (packed ? segment.sequence : 0);
        const mlstm::LaneTokens lane(0, tokens);
        float flow = 0.f;
        const int slices = (shape.dim_v + kSliceColumns - 1) / kSliceColumns;
        for (int part = fresh_laneid(); part < kKeysWarps * slices; part += 32)
            flow += p.flows[(part * heads + of_head) * slots + slot];
        float2 sums{0.f, 0.f};
        auto sum_of = [&](int part) {
            return lane.load(p.token_sums + (part * heads + of_head) * shape.seq + first_row, 0.f);
        };
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            const float2 of_q = sum_of(slice), of_k = sum_of(slices + slice), c = sum_of(2 * slices + slice);
            sums = {sums.x + of_q.x + of_k.x, sums.y + of_q.y + of_k.y};
            flow += c.x + c.y;
        }
        flow = warp_sum(flow);
        sums = mlstm::suffix_sums(sums);
        const float2 g = lane.load(GateRows(p.g, batch, head, first_row), 0.f);
        const Gate to = p.dg;
        auto store = [&](int t, float sum, float g) {
            store_gate(to, batch, head, first_row + t, ScalarDecay::forget_gradient(flow + sum, g));
        };
        if (lane.has_low) store(lane.low, sums.x, g.x);
        if (lane.has_high) store(lane.high, sums.y, g.y);
    }
}

}  // namespace tfla_tk::delta_rule
