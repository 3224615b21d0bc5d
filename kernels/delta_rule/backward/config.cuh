// Tiles, warpgroup roles and shared memory of the backward's mirror walk.
#pragma once

#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// kNothingElse: the walk leaves nothing but states, for the split of sequences.
template <class Type, int kDim, int kCount, Schedule kOrder, bool kNothingElse = false> struct MirrorConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount;
    static constexpr bool kBackward = true, kStatesAlone = kNothingElse;
    static constexpr Schedule kSchedule = kOrder;
    static constexpr bool kIsWide = kDimK > 128, kHasScorer = kMakesScores<kDimK, kWalkers, 0>;
    static constexpr int kWarpgroups = 1 + kWalkers + kHasScorer, kThreads = 128 * kWarpgroups;
    // chunks in shared memory
    static constexpr int kStages = kDimK == 64 || (kWalkers == 1 && !kIsWide) || kStatesAlone ? 3 : 2;
    static_assert(!(kIsWide && kStatesAlone), "the wide walker makes dV");
    static constexpr bool kHasGateRing = !(kIsWide && kWalkers == 2);  // else it would not fit
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 40, kScorerRegisters = 56;
    static constexpr int kWalkerRegisters = kHasScorer && kWalkers == 2 ? 208 : 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters + kHasScorer * kScorerRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

struct MirrorGlobals : WalkGlobals {
    TensorMap dout, writes;        // boxes of a chunk
    TensorMap dv, dv_box, dv_row;  // boxes of a chunk, of 16 rows and of one
    float* dbeta;
    int64_t dbeta_part;  // elements from one part's to the next one's
};

// Factors of a chunk's tokens.
template <class C> struct MirrorGates {
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

// All of a chunk but its gates, which arrive on the same barrier.
template <class C> struct MirrorStage : MirrorWrites<C> {
    typename C::Tile keys, queries;
    typename C::Square a, p;
    typename C::Columns douts[C::kWalkers];  // dO, then dV, until it is stored
};

template <class C> struct MirrorMemory {
    MirrorStage<C> stages[C::kStages];
    MirrorGates<C> gates[C::kStages];
    semaphore arrived[C::kStages];     // all of a chunk
    semaphore for_scorer[C::kStages];  // keys, queries, gates
    semaphore free[C::kStages];        // but for dO, which is followed by dV
    semaphore out_ready[C::kWalkers][C::kStages];
    semaphore tail_landed[1 + C::kWalkers];  // of each loading warp
    WalkTask task;
    GateRingIf<C::kHasGateRing> gate_ring;

    __device__ inline MirrorGates<C>& gates_of(int slot) { return gates[slot]; }

    __device__ inline void init_barriers() {
        constexpr int kColumns = C::kStatesAlone ? 1 : 2;  // dO, writes
        for (int i = 0; i < C::kStages; i++) {
            init_arrivals<C>(*this, i, kColumns * C::kWalkers);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        for (auto& of_walker : out_ready)
            for (auto& ready : of_walker) init_warp_barrier(ready, 4);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
