// How sequences are cut into segments and chunks.
#pragma once

namespace tfla_tk {

constexpr int kChunk = 64;  // tokens per chunk (L)

// How the sequences are cut: a segment is the stretch of a sequence that one CTA walks.
struct Cut {
    const void* offsets;  // [sequences + 1] of sequences packed in one batch entry; null: one per batch entry
    bool offsets_are_64bit;  // else 32-bit
    int sequences;           // N
    int segments;            // of all sequences together; packed: an upper bound
    int segment_chunks;      // chunks of a segment, the last one of a sequence may have fewer

    template <class Visit> void fields(Visit& visit) {
        visit(offsets, offsets_are_64bit, sequences, segments, segment_chunks);
    }
};

// Slots per head of a per-chunk array. Chunk c of an unpacked sequence has slot c; chunk c of packed sequence
// s, which starts at token t, has slot t / 64 + s + c.
inline int chunk_slots(int seq, int sequences, bool packed) {
    return (seq + kChunk - 1) / kChunk + (packed ? sequences : 0);
}

}  // namespace tfla_tk
