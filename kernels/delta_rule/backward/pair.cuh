// Shared memory of a pair, the two warpgroups of the mirror that walk the same 64 columns of V:
//   the chain walker holds dS^T and does what the next state's gradient waits for (chain_walker.cuh)
//   the side walker makes P^T dO ahead of it, and dV and dbeta behind it (side_walker.cuh)
//
// What they hand over goes from a thread to the thread with the same number (thread_words.cuh).
#pragma once

#include "delta_rule/backward/config.cuh"
#include "delta_rule/thread_words.cuh"

namespace tfla_tk::delta_rule {

// Read by the chain walker.
template <class C> struct ChainStage {
    typename C::Tile keys, queries;
    typename C::Square a;
};

// Read by the side walker, ahead of the chain.
template <class C> struct SideStage {
    typename C::Square p;
    typename C::Columns dout;
};

template <class C> struct MirrorPairMemory {
    static constexpr int kGateWarps = 2, kSideStages = 2;
    ChainStage<C> stages[C::kStages];
    SideStage<C> side_stages[kSideStages];
    typename C::Columns writes[kSideStages];  // the forward's (gates.cuh)
    typename C::Columns dv;                   // until it is stored
    ThreadWords<2 * kChunk / 16> through;     // (P^T dO)^T
    ThreadWords<kChunk / 16> scaled;          // dO^T times s e^b, rounded
    ThreadWords<2 * kChunk / 16> dy;          // dY^T
    MirrorGates gates[C::kStages];
    GateRing gate_rings[kGateWarps];
    semaphore arrived[C::kStages];        // keys, queries, A; the gates
    semaphore free[C::kStages];           // what the chain walker reads
    semaphore gated[C::kStages];          // the gates, for the side walker
    semaphore side_done[C::kStages];      // dV is there; the gates and writes are read
    semaphore side_arrived[kSideStages];  // P, dO
    semaphore side_free[kSideStages];
    semaphore writes_arrived[kSideStages];
    semaphore dv_free;
    semaphore through_ready, through_free, dy_ready, dy_free;  // what is handed over
    semaphore tail_landed[2];                                  // of each loading warp
    WalkTask task;

    __device__ inline void init_barriers() {
        constexpr int kTiles = 3;  // keys, queries, A
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], kTiles + kArrivalsPerWarp);
            init_warp_barrier(free[i], 4);
            init_warp_barrier(gated[i], 1);
            init_warp_barrier(side_done[i], 4);
        }
        for (int i = 0; i < kSideStages; i++) {
            init_semaphore(side_arrived[i], 2);
            init_warp_barrier(side_free[i], 4);
            init_semaphore(writes_arrived[i], 1);
        }
        init_warp_barrier(dv_free, 1);
        for (auto* made : {&through_ready, &through_free, &dy_ready, &dy_free}) init_warp_barrier(*made, 4);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }

    __device__ inline GateRing& ring_of(int warp) { return gate_rings[warp]; }
    // Until a step's gates may be written.
    __device__ inline void wait_gates_free(int step) {
        const Use<C::kStages> use(step);
        wait_free(free[use.slot], use.phase);
        wait_free(side_done[use.slot], use.phase);
    }
    // By the warp that has written them.
    __device__ inline void hand_gates_over(int step) {
        const int slot = Use<C::kStages>(step).slot;
        arrive_warp(arrived[slot]);
        arrive_warp(gated[slot]);
    }
};

template <class C>
using MirrorMemoryOf = std::conditional_t<C::kIsPair, MirrorPairMemory<C>, MirrorMemory<C>>;

}  // namespace tfla_tk::delta_rule
