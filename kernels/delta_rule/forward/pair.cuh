// Shared memory of a pair, the two warpgroups that walk the same 64 columns of V:
//   the chain walker holds S^T and does what the next state waits for (chain_walker.cuh)
//   the output walker makes O, and the writes for a backward, at its own pace (output_walker.cuh)
//
// The chain walker hands over S^T, rounded to the operands that it has made for itself, and U' in fp32. Both
// go from a thread to the thread with the same number in the other warpgroup, as 16 bytes of registers at a
// time. So nobody but these two threads looks at them, and their order in memory is free.
#pragma once

#include "delta_rule/forward/config.cuh"
#include "delta_rule/thread_words.cuh"

namespace tfla_tk::delta_rule {

template <class C> struct PairStage {
    typename C::Tile keys, queries;
    typename C::Square a, p;
    typename C::Columns values;
};

template <class C> struct PairMemory {
    static constexpr int kGateWarps = 2;
    PairStage<C> stages[C::kStages];
    typename C::Columns out, writes;      // O and written U', until they are stored
    ThreadWords<C::kDimK / 16> state;     // S^T, rounded
    ThreadWords<2 * kChunk / 16> update;  // U'^T
    ForwardGates gates[C::kStages];
    GateRing gate_rings[kGateWarps];
    semaphore arrived[C::kStages];    // for the chain walker: keys, A, V; the gates, for both walkers
    semaphore free[C::kStages];       // what the chain walker reads
    semaphore asked[C::kStages];      // for the output walker: queries, P
    semaphore out_ready[C::kStages];  // O is there, and what the output walker reads is free
    semaphore out_free;
    semaphore writes_ready, writes_free;
    semaphore state_ready, state_free, update_ready, update_free;  // what is handed over
    semaphore tail_landed[2];                                      // of each loading warp
    WalkTask task;

    __device__ inline void init_barriers() {
        constexpr int kTiles = 3;  // keys, A, V
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], kTiles + kArrivalsPerWarp);
            init_warp_barrier(free[i], 4);
            init_semaphore(asked[i], 2);
            init_warp_barrier(out_ready[i], 4);
        }
        for (auto* made : {&writes_ready, &state_ready, &state_free, &update_ready, &update_free})
            init_warp_barrier(*made, 4);
        for (auto* stored : {&out_free, &writes_free}) init_warp_barrier(*stored, 1);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }

    __device__ inline GateRing& ring_of(int warp) { return gate_rings[warp]; }
    // Until a chunk's gates may be written.
    __device__ inline void wait_gates_free(int chunk) {
        const Use<C::kStages> use(chunk);
        wait_free(free[use.slot], use.phase);
        wait_free(out_ready[use.slot], use.phase);
    }
    __device__ inline ForwardGates& gates_of(int chunk) { return gates[Use<C::kStages>(chunk).slot]; }
};

template <class C> using ForwardMemoryOf = std::conditional_t<C::kIsPair, PairMemory<C>, ForwardMemory<C>>;

}  // namespace tfla_tk::delta_rule
