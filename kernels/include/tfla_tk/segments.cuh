// Which stretch of which sequence a CTA works on.
//
// Sequences are cut into segments of `segment_chunks` chunks; their numbers run through all sequences. A
// sequence has at least one segment, also when it has no token.
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

// How many segments a packed sequence has.
__device__ inline int packed_segments(const Cut& cut, int seq, int sequence) {
    const int length = sequence_start(cut, seq, sequence + 1) - sequence_start(cut, seq, sequence);
    const int segment_tokens = cut.segment_chunks * kChunk;
    return max((length + segment_tokens - 1) / segment_tokens, 1);
}

// The number of a sequence's first segment. Called by whole warps.
__device__ inline int first_segment(const Cut& cut, int seq, int sequence) {
    if (cut.offsets == nullptr) return sequence * (cut.segments / cut.sequences);
    int before = 0;
    for (int other = kittens::laneid(); other < sequence; other += 32)
        before += packed_segments(cut, seq, other);
    return warp_sum(before);
}

// The `index`-th segment. Called by whole warps: 32 packed sequences are looked at at a time.
__device__ inline Segment find_segment(const Cut& cut, int seq, int index) {
    const int segment_tokens = cut.segment_chunks * kChunk;
    auto piece = [&](int sequence, int number, int count, int start, int length) {
        const int first = number * segment_tokens;
        return Segment{sequence, number, count, start + first, min(length - first, segment_tokens)};
    };
    if (cut.offsets == nullptr) {
        const int count = cut.segments / cut.sequences;
        return piece(index / count, index % count, count, 0, seq);
    }
    int before = 0;  // segments of the sequences before `base`
    for (int base = 0; base < cut.sequences; base += 32) {
        const int sequence = base + kittens::laneid();
        const bool exists = sequence < cut.sequences;
        const int start = exists ? sequence_start(cut, seq, sequence) : 0;
        const int length = exists ? max(sequence_start(cut, seq, sequence + 1) - start, 0) : 0;
        const int count = exists ? packed_segments(cut, seq, sequence) : 0;
        const int end =
            warp_inclusive_sum(count, kittens::laneid());  // segments up to and with this sequence
        const unsigned later = __ballot_sync(0xffffffff, index < before + end);
        if (later != 0) {
            const int owner = __ffs(later) - 1;
            auto of_owner = [&](int x) { return __shfl_sync(0xffffffff, x, owner); };
            return piece(base + owner, index - before - of_owner(end - count), of_owner(count),
                         of_owner(start), of_owner(length));
        }
        before += __shfl_sync(0xffffffff, end, 31);
    }
    return {0, 0, 0, 0, -1};
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
