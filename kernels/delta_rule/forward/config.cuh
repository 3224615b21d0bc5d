// Tiles, warpgroup roles and shared memory of the forward's walk.
#pragma once

#include "common/store_rows.cuh"
#include "delta_rule/chunk_matrices/in_walk.cuh"
#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// kOfMakers: warpgroups of a CTA of makers (chunk_matrices/makers.cuh), with the one that serves them; 0:
// there are no makers. kMakes: the walk has its own maker in the place of the scorer
// (chunk_matrices/in_walk.cuh); whoever else asks takes it for a scorer.
template <class Type, int kDim, int kCount, int kOfMakers = 0, bool kMakes = false> struct ForwardConfig {
    using T = Type;
    static constexpr int kDimK = kDim, kWalkers = kCount, kMakerWarpgroups = kOfMakers;
    static constexpr bool kBackward = false, kStatesAlone = false;
    static constexpr bool kMakesMatrices = kMakes;
    static constexpr bool kIsWide = kDimK > 128, kHasScorer = kMakesScores<kDimK, kWalkers, kMakerWarpgroups>;
    static constexpr int kWalkWarpgroups = 1 + kWalkers + kHasScorer;
    static constexpr int kWarpgroups = std::max(kWalkWarpgroups, kMakerWarpgroups),
                         kThreads = 128 * kWarpgroups;
    static constexpr int kStages = kIsWide ? 2 : 3;  // chunks in shared memory
    // Warpgroups are idle where a CTA of makers has more than the walk needs. NOTES: all registers together
    // no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kIdleWarpgroups = kWarpgroups - kWalkWarpgroups, kIdleRegisters = 24;
    static constexpr int kProducerRegisters = kMakes ? 32 : 40, kScorerRegisters = kMakes ? 64 : 56;
    static constexpr int kWalkerRegisters = kWalkers == 2 && kHasScorer            ? 208
                                            : kWalkers == 2 && kIdleWarpgroups > 0 ? 224
                                            : kWalkers == 1 && kIsWide             ? 248
                                                                                   : 232;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters + kHasScorer * kScorerRegisters +
                      kIdleWarpgroups * kIdleRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;  // of V, of one walker
};

struct ForwardGlobals : WalkGlobals {
    TensorMap v;  // boxes of a chunk
    ResultMaps o, writes;
    bool keep_writes, keep_matrices;
    void* states;  // S^T that enters each chunk; null: not wanted
};

// Factors of a chunk's tokens.
template <class C> struct ForwardGates {
    [[no_unique_address]] Log2DecayIf<C::kHasScorer> log2_decay;
    TokenFactors minus_read;  // -e^b
    TokenFactors out;         // s e^b
    TokenFactors beta;
    // the part of beta e^{b_L - b} that is in the writes (written_part)
    [[no_unique_address]] std::conditional_t<C::kIsWide, TokenFactors, Nothing> written;
    TokenFactors update;  // beta e^{b_L - b}
    float decay;          // e^{b_L}
};

// All of a chunk, behind one barrier, but for P that walkers make: to ask a barrier takes a walker some 30
// cycles.
template <class C> struct ForwardStage {
    typename C::Tile keys, queries;
    typename C::Square a, p;
    typename C::Columns values[C::kWalkers];  // then O, until it is stored
    ForwardGates<C> gates;
};

template <class C> struct ForwardMemory {
    ForwardStage<C> stages[C::kStages];
    typename C::Columns writes[C::kWalkers];  // U', of a wide K written U', until it is stored
    [[no_unique_address]] std::conditional_t<C::kMakesMatrices, MakerInWalkMemory<C::kStages>, Nothing> maker;
    GateRing gate_ring;
    semaphore arrived[C::kStages];     // all of a chunk, but for P that walkers make
    semaphore for_scorer[C::kStages];  // keys, queries, gates
    semaphore free[C::kStages];        // may be loaded again, but for the values, which are followed by O
    semaphore out_ready[C::kWalkers][C::kStages];
    semaphore writes_ready[C::kWalkers], writes_free[C::kWalkers];
    semaphore tail_landed[1 + C::kWalkers];  // of each loading warp
    WalkTask task;

    __device__ inline ForwardGates<C>& gates_of(int slot) { return stages[slot].gates; }

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_arrivals<C>(*this, i, C::kWalkers);
            init_warp_barrier(free[i], 4 * C::kWalkers);
        }
        for (int walker = 0; walker < C::kWalkers; walker++) {
            for (auto& ready : out_ready[walker]) init_warp_barrier(ready, 4);
            init_warp_barrier(writes_ready[walker], 4);
            init_warp_barrier(writes_free[walker], 1);
        }
        if constexpr (C::kMakesMatrices)
            for (auto& made : maker.scores_made) init_warp_barrier(made, 4 * C::kWalkers);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
