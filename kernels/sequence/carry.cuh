// Carrying a state over the boundaries between the segments of a sequence.
#pragma once

#include "kittens.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk {

// A sequence whose state is carried over the boundaries between its segments.
struct CarriedSequence {
    int sequence;
    int boundaries;  // 0: nothing to do
    int first_slot;  // of the boundaries, times heads; the others follow
};

// How many CTAs look for a sequence to carry: one for each, or one for each boundary where those are fewer.
inline int carrying_ctas(const Cut& cut) {
    const int boundaries = cut.segments - cut.sequences;
    return cut.offsets != nullptr && boundaries < cut.sequences ? boundaries : cut.sequences;
}

// What the `index`-th of them carries. Called by whole warps.
__device__ inline CarriedSequence find_carried(const Cut& cut, int seq, int index) {
    if (cut.offsets == nullptr) {
        const int boundaries = cut.segments / cut.sequences - 1;
        return {index, boundaries, index * boundaries};
    }
    int sequence = index;
    const bool by_boundary = cut.segments - cut.sequences < cut.sequences;
    if (by_boundary)  // the sequence that the boundary is in: of those that start before it the last one
        sequence = last_sequence(cut.sequences, [&](int other) {
            return sequence_start(cut, seq, other) / segment_tokens(cut) <= index;
        });
    if (sequence < 0) return {0, 0, 0};
    const PackedSequence found(cut, seq, sequence);
    const int first_slot = found.first_segment - sequence;
    // another CTA has the sequence where this boundary is not its first
    if (by_boundary && first_slot != index) return {0, 0, 0};
    return {sequence, found.segments - 1, first_slot};
}

constexpr int kCombineThreads = 128;  // of a CTA that carries states on

// Carries four elements of a state on over the boundaries of a sequence, in place: what the segment before a
// boundary adds by itself becomes what arrives there,
//   X = decay X + weight own.
//
// x: what the walk enters the first of them with. own(step): where a boundary's elements are. load(step):
// what its two factors follow from; factors(step, loaded), called in order, makes them.
template <class Own, class Load, class Factors>
__device__ inline void carry_over_boundaries(float4 x, int count, Own own, Load load, Factors factors) {
    // boundaries whose loads are. NOTES: eight take registers, and fewer CTAs run at a time
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
