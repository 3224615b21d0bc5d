// Carries a state over the boundaries between the segments of a sequence.
#pragma once

#include "kittens.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk {

// A sequence whose state is carried over the boundaries between its segments.
struct CarriedSequence {
    int sequence;
    int boundaries;  // 0: nothing to do
    int first_slot;  // of its first boundary, before heads are counted; the others follow it
};

// CTAs per head and block of elements: one per sequence, or one per boundary where those are fewer.
inline int carrying_ctas(const Cut& cut) {
    const int boundaries = cut.segments - cut.sequences;
    return cut.offsets != nullptr && boundaries < cut.sequences ? boundaries : cut.sequences;
}

// The sequence that the `index`-th of them carries. Called by whole warps.
__device__ inline CarriedSequence find_carried(const Cut& cut, int seq, int index) {
    if (cut.offsets == nullptr) {
        const int boundaries = cut.segments / cut.sequences - 1;
        return {index, boundaries, index * boundaries};
    }
    int sequence = index;
    const bool by_boundary = cut.segments - cut.sequences < cut.sequences;
    if (by_boundary)  // the last sequence that starts before the boundary has it
        sequence = last_sequence(cut.sequences, [&](int other) {
            return sequence_start(cut, seq, other) / segment_tokens(cut) <= index;
        });
    if (sequence < 0) return {0, 0, 0};
    const PackedSequence found(cut, seq, sequence);
    const int first_slot = found.first_segment - sequence;
    // a sequence is carried by the CTA of its first boundary
    if (by_boundary && first_slot != index) return {0, 0, 0};
    return {sequence, found.segments - 1, first_slot};
}

constexpr int kCombineThreads = 128;  // of a CTA of the combine kernels

// Carries four elements of a state over `count` boundaries, in place. Before, a boundary's slot holds the sum
// of the segment before it; after, the state that arrives there:
//   X = decay X + weight own.
//
// x: the state before the first boundary. own(step): address of a boundary's elements. load(step): the inputs
// of its two factors; factors(step, loaded): {decay, weight}, called in order.
template <class Own, class Load, class Factors>
__device__ inline void carry_over_boundaries(float4 x, int count, Own own, Load load, Factors factors) {
    // boundaries whose loads are in flight. NOTES: with eight, registers limit the CTAs per SM
    constexpr int kInFlight = 4;
    for (int first = 0; first < count; first += kInFlight) {
        float4 added[kInFlight];
        decltype(load(0)) loaded[kInFlight];
#pragma unroll
        for (int n = 0; n < kInFlight; n++)
            if (first + n < count) added[n] = *own(first + n), loaded[n] = load(first + n);
#pragma unroll
        for (int n = 0; n < kInFlight; n++)
            if (first + n < count) {
                const auto [decay, weight] = factors(first + n, loaded[n]);
                x = {decay * x.x + weight * added[n].x, decay * x.y + weight * added[n].y,
                     decay * x.z + weight * added[n].z, decay * x.w + weight * added[n].w};
                *own(first + n) = x;
            }
    }
}

}  // namespace tfla_tk
