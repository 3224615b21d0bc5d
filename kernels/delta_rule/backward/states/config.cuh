// Tiles, warpgroup roles and shared memory of the walks for the gradients of q and k.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/backward/sums.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

enum class StateWalk { left, right };

template <class Type, StateWalk kWhich> struct StatesConfig {
    using T = Type;
    static constexpr int kDimV = 128, kWalkers = 2;  // of V: a slice
    static constexpr StateWalk kWalk = kWhich;
    static constexpr bool kIsLeft = kWalk == StateWalk::left;
    static constexpr int kThreads = 128 * (kWalkers + 1);
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 40, kWalkerRegisters = 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters <=
                  65536 / kThreads / 8 * 8 * (kWalkers + 1));

    static constexpr int kAnchorUnits = anchor_units_of(kDimV);

    using Values = PanelTile<T, kChunk, kDimV>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of K, of one walker
};

// Eight bits of each number of a walker's result, those below its upper half, as the walker's threads have
// them: of 16 tokens each.
struct LowBytes {
    uint2 of_tokens[kChunk / 16][128];
};

// Walkers' columns per head, as many as the CTAs with the most walkers have.
__host__ __device__ inline int low_columns(int dim_k) {
    return (dim_k + 2 * kWalkerColumns - 1) / (2 * kWalkerColumns) * 2;
}

// Fields as in bindings/params_states.h.
struct StatesGlobals {
    TensorMap q, k, writes, dout, dv, left;  // boxes of a chunk
    ResultMaps dq;                           // of the left walk
    ResultMaps dk;                           // of the left walk: the left part
    GateWords g, beta;
    Cut cut;
    const float* borders;
    int heads, group, seq, dim_k, dim_v;
    int ctas, slices, shared;  // of K per segment, head and slice; of V; heads of v that share results
    int slots;                 // of chunks, per head
    int anchor_slots;          // per head
    int64_t rows, chunk_sums;  // elements of a part of `whole`, of `inter`
    int64_t all_flows;         // of half of `flows`
    const float* entering;
    float* leaving;
    float* whole;
    FlowSum* inter;
    uint4* anchors;
    float* flows;
    int* written;   // a ticket, then per CTA
    LowBytes* low;  // [results, batch, heads / shared, walkers' columns, slots]; null where none are kept
    int64_t low_of_result;  // of these, per result
    float scale;
    int at_once;  // shared results that the GPU serves at once

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
    __host__ __device__ inline int turns() const { return shared * slices; }
    __device__ inline int parts_of_slice() const { return (dim_k + 15) / 16; }
    __device__ inline int parts() const { return slices * parts_of_slice(); }
};

// Of a chunk's tokens.
struct StatesGates {
    TokenFactors read;    // e^b
    TokenFactors update;  // rest e^{b_L - b} (update_part)
    float rest[kChunk];   // of beta (rest_part)
    Log2Decay log2_decay;
    float decay;  // e^{b_L}
};

// A CTA's task, its states, and where the sums of its (segment, head) go; null where none are wanted. NOTES:
// computed once and reread from shared memory, to save registers.
struct StatesTask : Task {
    int value;                      // the first column of V
    int result_head, turn;          // of dq, left and dk; of this CTA among those that share it
    int first_part;                 // of the sums over K
    int* written;                   // chunks of which this CTA has written the results
    const float* entering;          // the state that the walk begins with, null: zero
    float* leaving;                 // the place of the state that it ends with
    int first_anchor, last_anchor;  // chunks of the segment that may have an anchor before them
    float* whole;                   // of its first token
    FlowSum* inter;                 // of its first chunk
    uint4* anchors;                 // of the head's first anchor
    float* flows;

    // Called by whole warps.
    template <class C> __device__ static inline StatesTask of_block(const StatesGlobals& g, int block) {
        const int slice = block / g.ctas % g.slices, value = slice * C::kDimV;
        const int part = slice * g.parts_of_slice();
        const Task task = Task::of_block<C>(g, block / g.ctas / g.slices * g.ctas + block % g.ctas);
        int* const written = g.written ? g.written + 1 + block : nullptr;
        const bool first = task.is_first(), last = task.is_last();
        const bool begins = C::kIsLeft ? first : last, ends = C::kIsLeft ? last : first;
        const int64_t state = task.state * g.dim_k * g.dim_v;
        const float* entering = g.entering ? g.entering + state : nullptr;
        if (!begins)
            entering = border_state(g, task, (C::kIsLeft ? task.number : task.number + 1) * kSegmentChunks);
        float* const leaving = ends && g.leaving ? g.leaving + state : nullptr;
        const int turn = task.head % g.shared * g.slices + slice;
        StatesTask found{task, value, task.head / g.shared, turn, part, written, entering, leaving, 0, -1};
        if (g.whole == nullptr) return found;
        const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
        const int64_t anchor_parts = head * g.anchor_slots * g.parts();
        found.first_anchor = first ? 1 : 0, found.last_anchor = last ? task.chunks - 1 : task.chunks;
        found.whole = g.whole + head * g.seq + task.first_row;
        found.inter = g.inter + head * g.slots + task.first_slot;
        found.anchors = g.anchors + anchor_parts * C::kAnchorUnits, found.flows = g.flows + anchor_parts;
        return found;
    }
};

// A walker reads and replaces its own columns alone.
template <class C, StateWalk> struct StatesColumns {
    typename C::Columns queries, keys;  // then dq and the left part of dk, until they are stored
};
template <class C> struct StatesColumns<C, StateWalk::right> {
    typename C::Columns queries, keys;
    typename C::Columns earlier;  // the left part of dk, later dk of the turn before; then dk of this one
};

template <class C> struct StatesStage {
    typename C::Values writes, dout, dv;
    StatesColumns<C, C::kWalk> columns[C::kWalkers];
};

// What each walker adds its results to: those of the turn before. In the right walk all but low bytes are in
// the stages.
template <class C, StateWalk> struct EarlierResults {
    typename C::Columns dq[C::kWalkers], left[C::kWalkers];
    LowBytes low[C::kWalkers][2];  // of dq and of left
};
template <class C> struct EarlierResults<C, StateWalk::right> {
    LowBytes low[C::kWalkers][1];
};

// R and E of a chunk.
template <class C> struct ChunkScores {
    typename C::Square reads, erasures;
};

template <class C> struct StatesMemory {
    // left walk: of dq, of left, and of their low bytes; right walk: of dk or the left part, and of low bytes
    static constexpr int kEarlierArrivals = C::kIsLeft ? 3 : 2;
    static constexpr bool kHasGateRing = !C::kIsLeft;  // else no room
    static constexpr int kOthers = sizeof(ChunkScores<C>) + sizeof(EarlierResults<C, C::kWalk>) +
                                   (kHasGateRing ? sizeof(GateRing) : 0) + 512;  // 512: barriers, the task
    static constexpr int kFitting =
        (MAX_SHARED_MEMORY - kOthers) / (sizeof(StatesStage<C>) + sizeof(StatesGates));
    static constexpr int kStages = std::clamp(kFitting, 2, 4);  // chunks in shared memory

    StatesStage<C> stages[kStages];
    ChunkScores<C> scores;
    EarlierResults<C, C::kWalk> earlier;
    StatesGates gates[kStages];
    semaphore arrived[kStages];                       // tiles, columns of each walker, gates
    semaphore free[kStages];                          // but for the columns, which are followed by results
    semaphore earlier_arrived[C::kWalkers][kStages];  // what results are added to (load_earlier)
    semaphore out_ready[C::kWalkers][kStages];        // results; the walker has read what they are added to
    semaphore out_read[kStages];                      // by the stores of all walkers
    semaphore tail_landed[3];                         // of each loading warp
    StatesTask task;
    GateRingIf<kHasGateRing> gate_ring;

    __device__ inline void init_barriers() {
        constexpr int kTiles = 3, kColumns = 2;
        for (int i = 0; i < kStages; i++) {
            init_semaphore(arrived[i], kTiles + kColumns * C::kWalkers + kArrivalsPerWarp);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        for (auto& of_walker : earlier_arrived)
            for (auto& arrived : of_walker) init_semaphore(arrived, kEarlierArrivals);
        for (auto& of_walker : out_ready)
            for (auto& ready : of_walker) init_warp_barrier(ready, 4);
        for (auto& read : out_read) init_warp_barrier(read, 1);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
