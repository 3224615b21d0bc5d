// Work split of the backward's gate kernels: a CTA takes the chunks from one anchor to the next, a warp one
// of them.
#pragma once

#include "scalar_gate/bindings/params.h"
#include "sequence/segments.cuh"

namespace tfla_tk::mlstm {

constexpr int kTileWarps = kAnchorChunks, kTileThreads = 32 * kTileWarps;

struct TileGlobals {
    Cut cut;  // its segments are tiles
    int batch, heads, seq, slots;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// Up to kAnchorChunks chunks of one (sequence, head), the first one after an anchor or at the sequence's
// start.
struct Tile {
    int batch, head;
    int first_row, tokens;    // tokens <= 0: nothing to do
    int first_chunk, chunks;  // of its sequence
    int all_chunks;           // of the sequence
    int slot;                 // of the sequence's first chunk, of chunk_slots
    int64_t batch_head;       // batch * heads + head
    int64_t state;            // sequence * heads + head

    // Called by whole warps.
    __device__ static inline Tile of_block(const TileGlobals& g, int block) {
        const int head = block % g.heads;
        const Segment s = find_segment(g.cut, g.seq, block / g.heads);
        const int first_chunk = s.number * g.cut.segment_chunks, start = s.first_row - first_chunk * kChunk;
        const int batch = g.packed() ? 0 : s.sequence;
        const int length =
            g.packed() && s.tokens > 0 ? sequence_start(g.cut, g.seq, s.sequence + 1) - start : g.seq;
        const int before = g.packed() ? start / kChunk + s.sequence : 0;  // slots of earlier sequences
        return {batch,
                head,
                s.first_row,
                s.tokens,
                first_chunk,
                (s.tokens + kChunk - 1) / kChunk,
                (length + kChunk - 1) / kChunk,
                before,
                static_cast<int64_t>(batch) * g.heads + head,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

}  // namespace tfla_tk::mlstm
