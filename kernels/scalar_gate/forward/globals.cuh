// Arguments of the forward kernels, and the task of one CTA.
#pragma once

#include "common/store_rows.cuh"
#include "kittens.cuh"
#include "scalar_gate/bindings/params.h"
#include "scalar_gate/gate/gates.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::mlstm {

using namespace kittens;

// Whether GEMMs overlap nothing, for measurements of what the overlap gains: each role waits for every GEMM
// before its next step, and state and output alternate; at K = 256 the scores of the next chunk wait for the
// state.
#ifdef TFLA_SEQUENTIAL
constexpr bool kSequential = true;
#else
constexpr bool kSequential = false;
#endif

// States between the kernels of a call whose sequences are cut: one slot per head and segment that follows
// another.
struct Workspace {
    // The state that arrives at the segment. Between mlstm_states and mlstm_combine: the sum of the segment
    // before it, relative to that segment's own stabiliser.
    State arriving;
    // Of the segment before: log2 of its decay, and the stabiliser of its sum in log2 units.
    double2* gates;

    // The slot of a segment's first head. Segment numbers also count the first segment of each sequence,
    // which has no slot.
    __device__ static inline int64_t slot(const Segment& s, int segment, int heads) {
        return static_cast<int64_t>(segment - s.sequence - 1) * heads;
    }

    static __host__ int64_t bytes(int64_t slots, int dim_qk, int dim_v) {
        const int64_t state = static_cast<int64_t>(dim_qk) * dim_v + dim_qk + 1;
        return slots * (sizeof(double2) + state * sizeof(float));
    }

    // gates first: their alignment is the largest
    __host__ Workspace(void* memory, int64_t slots, int dim_qk, int dim_v) {
        gates = static_cast<double2*>(memory);
        arriving.c = reinterpret_cast<float*>(gates + slots);
        arriving.n = arriving.c + slots * dim_qk * dim_v;
        arriving.m = arriving.n + slots * dim_qk;
    }
};

// Arguments of all kernels of a forward; fields as in MlstmFwdWalk of bindings/params.h.
struct FwdWalkGlobals {
    TensorMap k, v;
    Gate i, f;
    State initial;
    Workspace workspace;
    Cut cut;
    int heads, seq, dim_qk, dim_v, slices;
    int group;        // heads that share one of q and k
    int chunk_slots;  // of chunk_m
    int state_slots;  // of the states for the backward; 0: not wanted
    GateKind gate_kind;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

struct Globals : FwdWalkGlobals {
    TensorMap q;
    GateWords i_words, f_words;  // i and f, for GateStream
    ResultMaps h;
    State last;
    float *row_n, *row_m, *chunk_m;
    TensorMap states;  // for the backward, boxes of a CTA's rows
    LeftStates left;
    float scale, eps;
    FloatPair log2_scale;
};

// The (segment, head, V slice) of a CTA; slices of one head are neighbours and share Q and K through L2.
struct Task {
    int batch, head, column;  // column: first of V
    int key_head;             // of q and k
    int first_row, tokens;    // tokens < 0: nothing to do
    int chunks;
    bool first, last;  // segment of its sequence
    int64_t index;     // sequence * heads + head, of the caller's states
    int64_t slot;      // of the workspace; the next segment has slot + heads
    int64_t chunk;     // entry of the first chunk in chunk_m
    int first_chunk;   // of its sequence
    int first_state;   // slot of the sequence's first state for the backward; < 0: they are not wanted

    // Called by whole warps.
    template <class C> __device__ static inline Task of_block(const FwdWalkGlobals& g, int block) {
        const int pair = block / g.slices, segment = pair / g.heads, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, segment);
        const int batch = g.packed() ? 0 : s.sequence;
        // the segments before it in its sequence hold whole chunks
        const int chunks_before = s.first_row / kChunk + (g.packed() ? s.sequence : 0);
        const int first_chunk = s.number * g.cut.segment_chunks;
        const int start = s.first_row - first_chunk * kChunk;
        const int states_before = g.packed() ? start / (kChunk * kStateChunks) + s.sequence : 0;
        return {batch,
                head,
                block % g.slices * C::kSliceV,
                head / g.group,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                s.number == 0,
                s.number + 1 == s.count,
                static_cast<int64_t>(s.sequence) * g.heads + head,
                Workspace::slot(s, segment, g.heads) + head,
                (static_cast<int64_t>(batch) * g.heads + head) * g.chunk_slots + chunks_before,
                first_chunk,
                g.state_slots ? (batch * g.heads + head) * g.state_slots + states_before : -1};
    }

    // Whether the state that enters a chunk of the segment is left for the backward, and its slot, counted
    // over all heads.
    __device__ inline bool leaves_states() const { return first_state >= 0; }
    __device__ inline bool leaves_state(int chunk) const {
        return leaves_states() && (first_chunk + chunk) % kStateChunks == 0;
    }
    __device__ inline int state_slot(int chunk) const {
        return first_state + (first_chunk + chunk) / kStateChunks;
    }

    // The task's first element of a [B, H, S] vector.
    __device__ inline float* rows_of_head(const FwdWalkGlobals& g, float* rows) const {
        return rows + (static_cast<int64_t>(batch) * g.heads + head) * g.seq + first_row;
    }

    // The state at the task's start: null where it is zero.
    __device__ inline const float* initial_c(const FwdWalkGlobals& g) const {
        const int64_t size = static_cast<int64_t>(g.dim_qk) * g.dim_v;
        if (!first) return g.workspace.arriving.c + slot * size;
        return g.initial.c ? g.initial.c + index * size : nullptr;
    }
    __device__ inline const float* initial_n(const FwdWalkGlobals& g) const {
        if (!first) return g.workspace.arriving.n + slot * g.dim_qk;
        return g.initial.n ? g.initial.n + index * g.dim_qk : nullptr;
    }
    __device__ inline float initial_m(const FwdWalkGlobals& g) const {
        if (!first) return g.workspace.arriving.m[slot];
        return g.initial.m ? g.initial.m[index] : 0.f;
    }
};

}  // namespace tfla_tk::mlstm
