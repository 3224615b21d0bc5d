// How many chunks before its segment a walk has to begin so that it has the state that enters the segment,
// and how many behind it for the gradient (bindings/params.h).
#pragma once

#include "common/kernel.cuh"
#include "common/sync.cuh"
#include "common/warp.cuh"
#include "delta_rule/bindings/params.h"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

constexpr int kLeadWarps = 16;

struct LeadsGlobals {
    Cut cut;
    int heads, seq, slots;
    const ChunkBounds* bounds;
    int* leads;
    int longest;
};

// The chunks of a sequence and head.
struct BoundsOfChunks {
    const float4* first;

    __device__ inline ChunkBounds operator[](int chunk) const {
        const float4 x = first[2 * chunk], y = first[2 * chunk + 1];
        return {(x.x + x.z) + (y.x + y.z), (x.y + x.w) + (y.y + y.w)};
    }
    // Of the chunks [begin, end), by one warp: the product of their stretches.
    __device__ inline float stretch(int begin, int end) const {
        float sum = 0.f;
        for (int chunk = begin + fresh_laneid(); chunk < end; chunk += 32) sum += (*this)[chunk].stretch;
        return warp_sum(sum);
    }
};

// Chunks that a walk has to begin ahead of a border, by one warp. `available` of them are there; of(n): the
// bounds of the n-th one, counted from the border. stretch: of the segment on the other side. Stops where the
// lead is longer than `longest`. NOTES: all chunks are looked at, since a state that has shrunk may grow
// again.
template <class Of> __device__ inline int lead_of(int available, int longest, float stretch, Of of) {
    const int lane = fresh_laneid();
    auto load = [&](int n) { return n < available ? of(n) : ChunkBounds{0.f, 0.f}; };
    int lead = 0;
    float between = stretch;  // of what is nearer
    ChunkBounds next = load(lane);
#pragma unroll 1
    for (int first = 0; first <= available && lead <= longest; first += 32) {
        const ChunkBounds own = next;
        next = load(first + 32 + lane);
        float sum = own.whole;  // up to this lane's chunk and with it
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += other;
        }
        const float nearer = __shfl_up_sync(0xffffffff, sum, 1);
        const float left = between + (lane == 0 ? 0.f : nearer) + own.stretch;
        // NOTES: no comparison with NaN holds, so a bound of NaN leaves nothing out. Behind the last chunk
        // there is the state that the sequence begins with
        const unsigned reaching = __ballot_sync(0xffffffff, !(left < kForgotten));
        if (reaching != 0) lead = first + 32 - __clz(reaching);
        between += __shfl_sync(0xffffffff, sum, 31);
    }
    const int whole = (lead + kSegmentChunks - 1) / kSegmentChunks * kSegmentChunks;
    return min(whole, available);
}

// A CTA has a sequence and head, and the leads before the segments or those behind them; its warps take turns
// at the borders.
__global__ __launch_bounds__(32 *
                             kLeadWarps) void delta_leads_kernel(const __grid_constant__ LeadsGlobals g) {
    TFLA_DEVICE_CODE {
        __shared__ int is_carried;
        const int head = blockIdx.x % g.heads, sequence = blockIdx.x / g.heads, warp = threadIdx.x / 32;
        const bool is_packed = g.cut.offsets != nullptr, behind = blockIdx.y == 1;
        int slot = 0, batch = sequence, tokens = g.seq, segments = g.cut.segments / g.cut.sequences;
        int first_segment = sequence * segments;
        if (is_packed) {
            const PackedSequence own(g.cut, g.seq, sequence);
            slot = own.start / kChunk + sequence, batch = 0, tokens = own.tokens;
            segments = own.segments, first_segment = own.first_segment;
        }
        const int chunks = (tokens + kChunk - 1) / kChunk, length = g.cut.segment_chunks;
        const BoundsOfChunks bounds{
            reinterpret_cast<const float4*>(g.bounds + 4 * ((batch * g.heads + head) * g.slots + slot))};
        int* const leads =
            g.leads + (behind * g.cut.segments + first_segment) * g.heads + head;  // of a segment
        if (threadIdx.x == 0) is_carried = 0;
        __syncthreads();
        for (int border = 1 + warp; border < segments; border += kLeadWarps) {
            const int chunk = border * length;  // behind the border
            const int lead =
                behind ? lead_of(chunks - chunk, g.longest, bounds.stretch(chunk - length, chunk),
                                 [&](int n) { return bounds[chunk + n]; })
                       : lead_of(chunk, g.longest, bounds.stretch(chunk, min(chunk + length, chunks)),
                                 [&](int n) { return bounds[chunk - 1 - n]; });
            if (fresh_laneid() == 0) {
                leads[(border - behind) * g.heads] = lead;
                if (lead > g.longest) is_carried = 1;
            }
        }
        __syncthreads();
        if (is_carried)
            for (int border = 1 + threadIdx.x; border < segments; border += 32 * kLeadWarps)
                leads[(border - behind) * g.heads] = kCarried;
    }
}

}  // namespace tfla_tk::delta_rule
