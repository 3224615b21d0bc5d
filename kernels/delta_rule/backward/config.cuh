// Tiles, warpgroup roles and shared memory of the backward's mirror walk.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/backward/mirror_sums.cuh"
#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// What a mirror walk makes: nothing but states, for the split of sequences; the gradients of the values; also
// the right part of dk (right_part.cuh), for which it may leave the sums for dg.
enum class MirrorMakes { states, values, right_part, right_part_and_sums };

template <class Type, int kDim, int kCount, MirrorMakes kWhat = MirrorMakes::values> struct MirrorConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount, kDimV = kWalkers * kWalkerColumns;
    static constexpr bool kBackward = true, kStatesAlone = kWhat == MirrorMakes::states;
    static constexpr bool kMakesSums = kWhat == MirrorMakes::right_part_and_sums;
    static constexpr bool kMakesRight = kMakesSums || kWhat == MirrorMakes::right_part;
    static constexpr bool kIsWide = kDimK > 128, kHasScorer = kMakesScores<kDimK, kWalkers, 0>;
    static constexpr int kWarpgroups = 1 + kWalkers + kHasScorer, kThreads = 128 * kWarpgroups;
    // chunks in shared memory
    static constexpr int kStages = kDimK == 64 || (kWalkers == 1 && !kIsWide) || kStatesAlone ? 3 : 2;
    static_assert(!(kIsWide && kStatesAlone), "the wide walker makes dV");
    static_assert(!kMakesRight || (kDimK == 128 && kWalkers == 2), "a walker makes 64 columns of dk");
    static constexpr bool kHasGateRing = !(kIsWide && kWalkers == 2);  // else it would not fit
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 40, kScorerRegisters = 56;
    static constexpr int kWalkerRegisters = kHasScorer && kWalkers == 2 ? 208 : 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters + kHasScorer * kScorerRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    static constexpr int kAnchorUnits = anchor_units_of(kDimV);
    // Whether the producer adds up the sums of a walker's warps. NOTES: two wide walkers leave no room for
    // them; one has it, but the parts shall not depend on the walkers.
    static constexpr bool kAddsUpSums = !kStatesAlone && !kIsWide;
    // of V, of a sum for dbeta; Shape.strength_parts in call.py repeats this rule
    static constexpr int kStrengthColumns = kAddsUpSums ? kWalkerColumns : 16;

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Values = PanelTile<T, kChunk, kDimV>;  // of all walkers
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

// Of a walk that makes the right part of dk; fields as in RightPart of bindings/params.h.
struct RightGlobals {
    ResultMaps dk;             // a head for every slice
    int slices;                // of V
    int anchor_parts;          // in a slice, of 16 columns of K each
    int anchor_slots;          // per head
    int64_t rows, chunk_sums;  // elements of a part of `whole`, of `inter`
    float* whole;
    FlowSum* inter;
    uint4* anchors;

    __device__ inline int parts() const { return slices * anchor_parts; }  // of an anchor
};

struct MirrorGlobals : WalkGlobals {
    TensorMap dout, writes;  // boxes of a chunk
    ResultMaps dv;
    float* dbeta;        // sums for it
    int64_t dbeta_part;  // elements from one part of these to the next one
    RightGlobals right;
};

// Where the sums for dbeta go that begin with a column of V, of a chunk's first token.
template <class C>
__device__ inline float* strengths_of(const MirrorGlobals& g, const WalkTask& task, int chunk, int column) {
    const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
    return g.dbeta + column / C::kStrengthColumns * g.dbeta_part + head * g.seq + task.first_row +
           chunk * kChunk;
}

// The task of a walk that makes the right part of dk, and where the sums of its head go; null where none are
// wanted.
struct RightTask : WalkTask {
    int slice;                      // of V
    int first_part;                 // of an anchor, in this slice
    int first_anchor, last_anchor;  // chunks that may have an anchor before them
    float* whole;                   // of its first token
    FlowSum* inter;                 // of its first chunk
    uint4* anchors;                 // of the head's first anchor

    // Called by whole warps.
    template <class C> __device__ static inline RightTask of_block(const MirrorGlobals& g, int block) {
        const RightGlobals& right = g.right;
        const WalkTask task = WalkTask::of_block<C>(g, block);
        const int slice = task.column / C::kDimV;
        RightTask found{task, slice, slice * right.anchor_parts, 0, -1, nullptr, nullptr, nullptr};
        if constexpr (!C::kMakesSums) return found;
        const int64_t head = static_cast<int64_t>(task.batch) * g.heads + task.head;
        // before each chunk of the sequence behind its first one
        found.first_anchor = 1, found.last_anchor = task.last_own + !task.is_last();
        found.whole = right.whole + head * g.seq + task.first_row;
        found.inter = right.inter + head * g.slots + task.first_slot;
        found.anchors = right.anchors + head * right.anchor_slots * right.parts() * C::kAnchorUnits;
        return found;
    }
};

// Factors of a chunk's tokens, of a walk that makes the right part of dk.
template <class C, bool kMakesRight = C::kMakesRight> struct RightGates {};
template <class C> struct RightGates<C, true> {
    TokenFactors right;  // rest e^{b_L - b} (update_part)
    float rest[kChunk];  // of beta (rest_part)
};

// Factors of a chunk's tokens.
template <class C> struct MirrorGates : RightGates<C> {
    [[no_unique_address]] Log2DecayIf<C::kHasScorer> log2_decay;
    TokenFactors update;  // e^{b_L - b}
    TokenFactors out;     // s e^b
    TokenFactors beta;
    TokenFactors minus_read;  // -e^b beta
    float decay;              // e^{b_L}
};

// The forward's writes (gates.cuh), of walks that leave more than states.
template <class C, bool kStatesAlone = C::kStatesAlone> struct MirrorWrites {
    typename C::Columns writes[C::kWalkers];
};
template <class C> struct MirrorWrites<C, true> {};

// Sums for dbeta, of each walker.
template <class C, bool kIsThere = C::kAddsUpSums> struct MirrorStrengths {};
template <class C> struct MirrorStrengths<C, true> {
    WalkerSums strengths[C::kWalkers];
};

// The scores of the reads, of a walk that makes the right part of dk; made by the scorer.
template <class C, bool kMakesRight = C::kMakesRight> struct MirrorReads {};
template <class C> struct MirrorReads<C, true> {
    typename C::Square reads;
};

// All of a chunk but its gates, which arrive on the same barrier.
template <class C> struct MirrorStage : MirrorWrites<C>, MirrorReads<C>, MirrorStrengths<C> {
    typename C::Tile keys;
    typename C::Tile queries;  // then the right part of dk, until it is stored
    typename C::Square a, p;   // p: then the sums of the right part, until the producer has read them
    typename C::Columns douts[C::kWalkers];  // dO, then dV, until it is stored

    // Of each walker, once both have met behind the GEMM that reads P. NOTES: the scorer writes P again
    // behind the loads of dO, which wait until the producer has read what the walkers leave.
    __device__ inline RightSums* right_sums() {
        static_assert(C::kMakesRight && C::kHasScorer);
        static_assert(sizeof(p) >= C::kWalkers * sizeof(RightSums));
        return reinterpret_cast<RightSums*>(&p);
    }
};

// What the walkers of a walk that makes the right part of dk hand to each other.
template <class C, bool kMakesRight = C::kMakesRight> struct RightTiles {};
template <class C> struct RightTiles<C, true> {
    PanelTile<typename C::T, C::kDimV, C::kDimK> gradient;  // dS^T that leaves the chunk, rounded
    typename C::Square erasures;                            // their scores
};

template <class C> struct MirrorMemory : RightTiles<C> {
    MirrorStage<C> stages[C::kStages];
    MirrorGates<C> gates[C::kStages];
    semaphore arrived[C::kStages];     // all of a chunk
    semaphore for_scorer[C::kStages];  // what the scorer reads
    semaphore free[C::kStages];        // but for what results take the place of
    semaphore out_ready[C::kWalkers][C::kStages];
    semaphore out_read[C::kStages];  // results and sums, by the warps that store those of each walker
    semaphore tail_landed;
    std::conditional_t<C::kMakesRight, RightTask, WalkTask> task;
    GateRingIf<C::kHasGateRing> gate_ring;

    __device__ inline MirrorGates<C>& gates_of(int slot) { return gates[slot]; }

    __device__ inline void init_barriers() {
        constexpr int kColumns = C::kStatesAlone ? 1 : 2;  // dO, writes
        for (int i = 0; i < C::kStages; i++) {
            constexpr int kOfWalkers = kColumns * C::kWalkers;
            init_arrivals<C>(*this, i, kOfWalkers, C::kMakesRight ? kOfWalkers : 0);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        for (auto& of_walker : out_ready)
            for (auto& ready : of_walker) init_warp_barrier(ready, 4);
        for (auto& read : out_read) init_warp_barrier(read, C::kWalkers);
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
