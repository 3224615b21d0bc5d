// Which stretch of which sequence a CTA works on.
//
// Sequences are cut into segments of `segment_chunks` chunks. A sequence has at least one segment, also when
// it has no token. Segments are numbered through all sequences. Those of a packed sequence that starts at
// token t begin at number t / segment_tokens + sequence: a number that follows from its own offset alone and
// leaves room for the segments of all sequences before it. So some numbers have no segment.
//
// Offsets are clamped to the tokens that there are, and every number, slot and row follows from one
// sequence's two offsets alone. So no offsets, whatever they hold, lead out of the memory of a call.
#pragma once

#include "kittens.cuh"
#include "tfla_tk/gates.cuh"
#include "tfla_tk/params.h"

namespace tfla_tk {

struct Segment {
    int sequence;
    int number, count;  // this one and how many there are of its sequence
    int first_row;      // of the operands' S dimension
    int tokens;         // -1: past the last sequence, nothing to do
};

// First token of a packed sequence, or the end of the last one.
__device__ inline int sequence_start(const Cut& cut, int seq, int sequence) {
    const int64_t at = cut.wide_offsets ? static_cast<const int64_t*>(cut.offsets)[sequence]
                                        : static_cast<const int32_t*>(cut.offsets)[sequence];
    return static_cast<int>(min(max(at, int64_t{0}), static_cast<int64_t>(seq)));
}

__device__ inline int segment_tokens(const Cut& cut) { return cut.segment_chunks * kChunk; }

// A packed sequence: its first token, its tokens, its segments and the number of the first of them.
struct PackedSequence {
    int start, tokens, segments, first_segment;

    __device__ inline PackedSequence(const Cut& cut, int seq, int sequence) {
        start = sequence_start(cut, seq, sequence);
        tokens = max(sequence_start(cut, seq, sequence + 1) - start, 0);
        segments = max((tokens + segment_tokens(cut) - 1) / segment_tokens(cut), 1);
        first_segment = start / segment_tokens(cut) + sequence;
    }
};

// The last sequence of `count` for which `precedes`, which holds for the first ones alone; -1 where it holds
// for none. Called by whole warps: every step asks for 32 of them.
template <class Precedes> __device__ inline int last_sequence(int count, Precedes precedes) {
    const int lane = kittens::laneid();
    int first = 0, step = count;
    do {
        const int candidates = step;
        step = (candidates + 31) / 32;
        const int sequence = first + lane * step;
        const bool holds = lane * step < candidates && sequence < count && precedes(sequence);
        const int found = __popc(__ballot_sync(0xffffffff, holds));
        if (found == 0) return -1;
        first += (found - 1) * step;
    } while (step > 1);
    return first;
}

// The segment of a number. Called by whole warps.
__device__ inline Segment find_segment(const Cut& cut, int seq, int index) {
    auto piece = [&](int sequence, int number, int count, int start, int tokens) {
        const int first = number * segment_tokens(cut);
        return Segment{sequence, number, count, start + first, min(tokens - first, segment_tokens(cut))};
    };
    if (cut.offsets == nullptr) {
        const int count = cut.segments / cut.sequences;
        return piece(index / count, index % count, count, 0, seq);
    }
    const int sequence = last_sequence(cut.sequences, [&](int other) {
        return sequence_start(cut, seq, other) / segment_tokens(cut) + other <= index;
    });
    if (sequence >= 0) {
        const PackedSequence found(cut, seq, sequence);
        const int number = index - found.first_segment;
        if (number >= 0 && number < found.segments)
            return piece(sequence, number, found.segments, found.start, found.tokens);
    }
    return {0, 0, 0, 0, -1};
}

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
