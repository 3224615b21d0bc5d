// Tiles, warpgroup roles and shared memory of the backward's mirror walk.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// With K up to 128 a mirror leaves nothing but states, for the split of sequences; the walk of gradients/
// makes the rest. With a wide K it makes the gradients of the values.
template <class Type, int kDim, int kCount> struct MirrorConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount, kDimV = kWalkers * kWalkerColumns;
    static constexpr bool kIsWide = kDimK > 128, kHasScorer = kMakesScores<kDimK, kWalkers, 0>;
    static constexpr bool kBackward = true, kStatesAlone = !kIsWide;
    static constexpr int kWarpgroups = 1 + kWalkers + kHasScorer, kThreads = 128 * kWarpgroups;
    static constexpr int kStages = kIsWide ? 2 : 3;                    // chunks in shared memory
    static constexpr bool kHasGateRing = !(kIsWide && kWalkers == 2);  // else it would not fit
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 40, kScorerRegisters = 56;
    static constexpr int kWalkerRegisters = kHasScorer ? 208 : 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters + kHasScorer * kScorerRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

struct MirrorGlobals : WalkGlobals {
    TensorMap dout, writes;  // boxes of a chunk
    ResultMaps dv;
    float* strengths;  // sums for dbeta, [V / 16, batch, heads, seq]
    int64_t rows;      // elements of a part of these
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
    typename C::Columns douts[C::kWalkers];  // dO, of a walk that makes dV then that, until it is stored
};

template <class C> struct MirrorMemory {
    MirrorStage<C> stages[C::kStages];
    MirrorGates<C> gates[C::kStages];
    semaphore arrived[C::kStages];     // all of a chunk
    semaphore for_scorer[C::kStages];  // what the scorer reads
    semaphore free[C::kStages];        // but for what results take the place of
    semaphore out_ready[C::kWalkers][C::kStages];
    semaphore out_read[C::kStages];  // by the warps that store the results of each walker
    semaphore tail_landed;
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
        for (auto& read : out_read) init_warp_barrier(read, C::kWalkers);
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
