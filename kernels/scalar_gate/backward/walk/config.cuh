// Arguments, tiles, warpgroup roles, register split and shared-memory plan of the backward's walks.
#pragma once

#include "common/sync.cuh"
#include "common/tma.cuh"
#include "kittens.cuh"
#include "scalar_gate/backward/walk/gates.cuh"
#include "scalar_gate/backward/walk/normaliser.cuh"
#include "scalar_gate/bindings/params_walk.h"
#include "scalar_gate/shared_scores.cuh"
#include "sequence/begin_task.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::mlstm {

using namespace kittens;

// Arguments of a walk and of its segment sums; fields as in PassWalk of bindings/params_walk.h.
struct WalkGlobals {
    TensorMap keys, values;
    const float* e;
    int64_t e_stride;
    Boundaries boundaries;
    Cut cut;
    int batch, heads, seq, slots, dim_keys, dim_values;
    int state_columns;  // V of the states [K, V]
    int shares, slices;
    int group;  // heads that share one of q and k

    __device__ inline bool packed() const { return cut.offsets != nullptr; }

    // Elements of one head's state: [K, V], which is [keys, values] for dv and [values, keys] for dq and dk.
    __device__ inline int64_t state_size() const { return static_cast<int64_t>(dim_keys) * dim_values; }

    // Number of boundaries, of all sequences and heads.
    __device__ inline int64_t boundary_slots() const {
        return static_cast<int64_t>(cut.segments - cut.sequences) * heads;
    }
};

struct PassGlobals : WalkGlobals {
    ChunkGates* gates;
    TensorMap queries, factor;
    TensorMap out, out_row;  // boxes of 16 rows and of one
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    float* whole;
    FlowSum* inter;
    int64_t whole_stride, inter_stride;  // between slices
    void* states;
    float* flows;
    int* ticket;  // clusters of CTAs started so far; null where shares do not wait for each other
    int flow_parts, anchor_slots;

    // Whether row sums with a factor are wanted: for dq and dk of out . factor, for dv of values . factor.
    template <class C> __device__ inline bool has_factor() const { return C::kSumsRows || whole != nullptr; }
};

// The (segment, head, slice of the values, share of the keys) of a CTA. Slices of one share are neighbours in
// the grid; in a walk two neighbours form a cluster.
struct PassTask {
    int share;
    int batch, head, column;  // column: first of the values
    int key_head;             // of q and k
    int first_row, tokens;    // tokens < 0: nothing to do
    int first_chunk, chunks;  // first_chunk: counted in its sequence
    bool first, last;         // in the walk over its sequence's segments
    int64_t batch_head;       // batch * heads + head
    int slot;                 // of the first chunk (chunk_slots)
    int64_t row;              // first row in [B, H, S] vectors
    int64_t state;            // sequence * heads + head
    int64_t entered, left;    // slots of the boundaries where the walk enters and leaves the segment

    // The head of queries and keys, and that of values and the factor.
    template <class C> __device__ inline int keys_head() const { return C::kKeysAreOfQK ? key_head : head; }
    template <class C> __device__ inline int values_head() const { return C::kKeysAreOfQK ? head : key_head; }

    // First of the values' columns of a panel.
    template <class C> __device__ inline int panel_column(int block, int warpgroup_id) const {
        return column + C::panel(block, warpgroup_id) * 64;
    }

    // Whether there is an anchor before a chunk of the segment, and its number, counted over all heads.
    __device__ inline bool anchored(int chunk) const {
        return first_chunk + chunk > 0 && (first_chunk + chunk) % kAnchorChunks == 0;
    }
    __device__ inline int64_t anchor(const PassGlobals& g, int chunk) const {
        return batch_head * g.anchor_slots + (slot + chunk) / kAnchorChunks;
    }
    // Index of (share, slice) within the head.
    template <class C> __device__ inline int share_and_slice(const WalkGlobals& g) const {
        return share * g.slices + column / C::kSlice;
    }
    // Where dq stores its state at an anchor.
    template <class C> __device__ inline unsigned char* anchor_memory(const PassGlobals& g, int chunk) const {
        return static_cast<unsigned char*>(g.states) +
               (anchor(g, chunk) * g.shares * g.slices + share_and_slice<C>(g)) * C::kAnchorBytes;
    }

    // First of the share's columns of the keys.
    template <class C> __device__ inline int keys_column() const { return share * C::kDimKeys; }

    // The state at the walk's start, null where it is zero: the caller's, or the one that arrives at the
    // boundary. C starts at the share's columns. The caller's gradient of n is added in the first share only.
    template <class C> __device__ inline const float* entering_c(const PassGlobals& g) const {
        if (!first) return g.boundaries.c + entered * g.state_size() + keys_column<C>();
        return g.entering_c ? g.entering_c + state * g.state_size() + keys_column<C>() : nullptr;
    }
    template <class C> __device__ inline const float* entering_n(const PassGlobals& g) const {
        if (!first) return g.boundaries.n ? boundary_n<C>(g, entered) : nullptr;
        return g.entering_n && !(C::kBackward && share > 0) ? g.entering_n + state * g.dim_values : nullptr;
    }
    // n at a boundary: shares have one n in common, but each its own gradient of n.
    template <class C> __device__ inline float* boundary_n(const WalkGlobals& g, int64_t slot) const {
        return g.boundaries.n + ((C::kBackward ? share * g.boundary_slots() : 0) + slot) * g.dim_values;
    }

    // The elements of a [B, H, S] vector of this lane's two tokens of a chunk; 0 past the last token and for
    // null.
    __device__ inline float2 pair(const float* rows, int chunk) const {
        if (rows == nullptr) return {0.f, 0.f};
        const int t = chunk * kChunk + 2 * fresh_laneid();
        rows += row;
        return {t < tokens ? rows[t] : 0.f, t + 1 < tokens ? rows[t + 1] : 0.f};
    }

    // The same of e.
    __device__ inline float2 e_pair(const WalkGlobals& g, int chunk) const {
        return pair(g.e ? g.e + share * g.e_stride : nullptr, chunk);
    }

    // Called by whole warps.
    template <class C> __device__ static inline PassTask of_block(const WalkGlobals& g, int block) {
        const int slice = block % g.slices, share = block / g.slices % g.shares;
        const int pair = block / (g.slices * g.shares), segment = pair / g.heads, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, segment);
        const int batch = g.packed() ? 0 : s.sequence;
        const int64_t batch_head = static_cast<int64_t>(batch) * g.heads + head;
        const bool earliest = s.number == 0, latest = s.number + 1 == s.count;
        // slot of the boundary before this segment
        const int64_t before = static_cast<int64_t>(segment - s.sequence - 1) * g.heads + head;
        const int64_t after = before + g.heads;
        return {share,
                batch,
                head,
                slice * C::kSlice,
                head / g.group,
                s.first_row,
                s.tokens,
                s.number * g.cut.segment_chunks,
                (s.tokens + kChunk - 1) / kChunk,
                C::kBackward ? latest : earliest,
                C::kBackward ? earliest : latest,
                batch_head,
                s.first_row / kChunk + (g.packed() ? s.sequence : 0),
                batch_head * g.seq + s.first_row,
                static_cast<int64_t>(s.sequence) * g.heads + head,
                C::kBackward ? after : before,
                C::kBackward ? before : after};
    }
};

// Registers per thread of each role; they sum to at most 512 over the warpgroups, 65536 / 128 threads.
struct PassRegisters {
    int producer, scores, state;
};

struct PassTiling {
    int fragments;  // A fragments of a state warpgroup, 16 columns each; one is filled, others are read
    PassRegisters registers;
};

// One row per (columns of the keys, slice of the values). The comment names the limiting resource.
constexpr PassTiling pass_tiling(int dim_keys, int slice) {
    if ((dim_keys == 256 && slice == 128) || (dim_keys == 128 && slice == 256))
        return {3, {32, 64, 208}};                // registers: the state takes 128
    if (slice == 64) return {4, {48, 208, 240}};  // smem: one CTA per SM, but two of 64/64
    return {4, {48, 112, 176}};                   // smem: one CTA per SM
}

// Slices of 256 serve dv only: the row sums of dq and dk need more registers than they leave. What serves K
// and V up to kMostNarrow alone makes no gradient, which the walk of gradients/ does, but dk's segment sums.
constexpr bool pass_serves(int dim_keys, int slice, Gradient gradient) {
    if (gradient == Gradient::dv) return dim_keys > kMostNarrow || slice > kMostNarrow;
    return slice < 256 && (dim_keys > kMostNarrow || slice == kMostNarrow);
}
constexpr bool segments_serve(int dim_keys, int slice, Gradient gradient) {
    return gradient == Gradient::dk ? slice < 256
                                    : gradient == Gradient::dq && pass_serves(dim_keys, slice, gradient);
}

template <class T_, int kDimKeys_, int kSlice_, Gradient kGradient_, bool kNormalizer_> struct PassConfig {
    using T = T_;
    static constexpr int kDimKeys = kDimKeys_;  // columns of queries and keys, padded to the tile
    static constexpr int kSlice = kSlice_;      // columns of the values and of the state that one CTA owns
    static constexpr Gradient kGradient = kGradient_;
    static constexpr bool kBackward = kGradient != Gradient::dq;  // in time
    // whether q and k are the queries and keys (dv), or the values and the factor (dq, dk)
    static constexpr bool kKeysAreOfQK = kGradient == Gradient::dv;
    static constexpr bool kSumsRows = kGradient != Gradient::dv;  // rows of out . factor; with anchors
    static constexpr bool kNormalizer = kNormalizer_;             // e and n take part
    static_assert(kSumsRows || !kNormalizer);
    static constexpr PassTiling kTiling = pass_tiling(kDimKeys, kSlice);
    // scores_free of a stage lives in the CTA that makes the step's scores. Makers alternate from step to
    // step (ScoreTurns), so an even number of stages gives a stage one maker for the whole walk
    static constexpr int kStages = 2, kGateStages = 3;

    // Warpgroups: 0 is the producer (warp 0 loads tiles, 1 gates, 2 loads the factor and stores the gradient,
    // 3 adds up row sums), 1 makes the scores, the others hold the state.
    static constexpr int kStateWarpgroups = kSlice == 64 ? 1 : 2;
    static constexpr int kStateWarps = 4 * kStateWarpgroups;
    static constexpr int kThreads = 128 * (2 + kStateWarpgroups);

    // The transposed state of a warpgroup: blocks of 64 rows (columns of the values), split into at most 128
    // columns (of the keys), since a wgmma with N = 256 does not compile for 512 threads (C7602).
    static constexpr int kBlocks = kSlice / 64 / kStateWarpgroups;
    static constexpr int kPart = kDimKeys == 256 ? 128 : kDimKeys;
    static constexpr int kParts = kDimKeys / kPart;
    static constexpr int kFragments = kTiling.fragments;
    static_assert(kFragments >= 2);
    static constexpr int kOutStages = 2 * kBlocks;

    static constexpr int kValueFragments = 2;  // of 16 tokens of the values, unscaled
    static_assert(kValueFragments <= kFragments, "a fragment of scaled values is waited for with its values");

    // Warps that read the values: for dv also the scores' warps, which sum rows of values . factor.
    static constexpr int kValueReaders = kStateWarps + (kGradient == Gradient::dv ? 4 : 0);

    // An anchor in memory: the state as A fragments, one unit per thread at a time, then n.
    using AnchorUnit = uint4;
    static constexpr int64_t kAnchorBytes =
        static_cast<int64_t>(kSlice) * (kDimKeys * sizeof(T) + sizeof(float));

    // The panel of 64 columns of the values that a block of a warpgroup has.
    __device__ static inline int panel(int block, int warpgroup_id) { return warpgroup_id * kBlocks + block; }

    // The chunk of a step and its ring positions.
    __device__ static inline int chunk(const PassTask& task, int step) {
        return kBackward ? task.chunks - 1 - step : step;
    }
    __device__ static inline auto tile(int step) { return Use<kStages>(step); }
    __device__ static inline auto out(int step, int block) { return Use<kOutStages>(step * kBlocks + block); }
    __device__ static inline auto gate_stage(int step) { return Use<kGateStages>(step); }

    using Stage = PassStage<typename base_types::packing<T>::packed_type>;
    using KeyTile = PanelTile<T, kChunk, kPart>;
    using ValueTile = PanelTile<T, kChunk, kSlice>;
    using ScoreTile = PanelTile<T, kChunk, kChunk>;
    using OutTile = PanelTile<T, kChunk, 64>;
    using Norm = mlstm::Norm<T, kBackward>;
};

// Partial sums of out . factor of one state warpgroup. whole: per token and warp, each over its 16 columns.
// inter: per thread, the part through the entering state, over the chunk or over 16 tokens of a slow one.
struct alignas(16) PartialSums {
    float whole[4][kChunk], inter[128];
    float slow;  // as in PassStage
};

// All shared memory of a CTA.
template <class C> struct PassMemory {
    typename C::KeyTile keys[C::kStages][C::kParts];
    typename C::KeyTile queries[C::kStages][C::kParts];
    typename C::ValueTile values[C::kStages];
    typename C::ScoreTile scores[C::kStages];  // gated
    // 64 columns of the factor; the gradient replaces them, staged for TMA stores
    typename C::OutTile out[C::kOutStages][C::kStateWarpgroups];
    PartialSums sums[C::kSumsRows ? C::kStages : 0][C::kStateWarpgroups];
    // operands for n: factors on the values in its update, and on n in the output (e for dq, ones for dk)
    NormOperand norm_keys[C::kNormalizer ? C::kGateStages : 0];
    NormOperand norm_queries[!C::kNormalizer ? 0 : C::kBackward ? 1 : C::kGateStages];
    typename C::Stage gates[C::kGateStages];
    PassTask task;
    uint32_t lane_offsets[128];  // transposed_lane_offset of a state warpgroup's threads
    int ticket;                  // the cluster's, in its first CTA

    semaphore keys_arrived[C::kStages][C::kParts], keys_free[C::kStages][C::kParts];
    semaphore queries_arrived[C::kStages][C::kParts], queries_free[C::kStages][C::kParts];
    semaphore values_arrived[C::kStages], values_free[C::kStages];
    semaphore scores_ready[C::kStages];
    semaphore scores_free[C::kStages];    // by both CTAs' warps; in the CTA that makes the scores
    semaphore row_sums_free[C::kStages];  // the sums are complete when keys_free is
    semaphore gates_ready[C::kGateStages], gates_free[C::kGateStages];
    semaphore factor_arrived[C::kOutStages][C::kStateWarpgroups];
    semaphore factor_read[C::kOutStages][C::kStateWarpgroups];  // dv: by the scores' warps
    semaphore out_ready[C::kOutStages][C::kStateWarpgroups];
    semaphore out_free[C::kOutStages][C::kStateWarpgroups];  // used where there is no factor
    semaphore tail_landed, factor_tail_landed;               // a tile whose last rows are still to be zeroed

    // Every warp that reads a buffer arrives on its *_free barrier.
    __device__ inline void init_barriers() {
        constexpr int kByTma = 0;
        auto init = [](auto& ready, auto& free, int ready_warps, int reader_warps) {
            for (auto& barrier : ready)
                ready_warps == kByTma ? init_semaphore(barrier, 1) : init_warp_barrier(barrier, ready_warps);
            for (auto& barrier : free) init_warp_barrier(barrier, reader_warps);
        };
        for (int stage = 0; stage < C::kStages; stage++) {
            init(keys_arrived[stage], keys_free[stage], kByTma, 4 + C::kStateWarps);
            init(queries_arrived[stage], queries_free[stage], kByTma, 4 + C::kStateWarps);
        }
        for (int stage = 0; stage < C::kOutStages; stage++) {
            init(out_ready[stage], out_free[stage], 4, 1);
            init(factor_arrived[stage], factor_read[stage], kByTma, 4);
        }
        init(values_arrived, values_free, kByTma, C::kValueReaders);
        init(scores_ready, scores_free, 4, C::kStateWarps * cluster_ctas());
        for (auto& barrier : row_sums_free) init_warp_barrier(barrier, 1);
        init(gates_ready, gates_free, 1, 4 + C::kStateWarps);
        init_semaphore(tail_landed, 1);
        init_semaphore(factor_tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::mlstm
