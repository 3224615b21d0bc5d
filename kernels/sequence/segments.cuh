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
#include "sequence/cut.h"

namespace tfla_tk {

struct Segment {
    int sequence;
    int number, count;  // this one and how many there are of its sequence
    int first_row;      // of the operands' S dimension
    int tokens;         // -1: past the last sequence, nothing to do
};

// First token of a packed sequence, or the end of the last one.
__device__ inline int sequence_start(const Cut& cut, int seq, int sequence) {
    const int64_t at = cut.offsets_are_64bit ? static_cast<const int64_t*>(cut.offsets)[sequence]
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

}  // namespace tfla_tk
