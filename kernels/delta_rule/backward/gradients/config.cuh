// Warpgroup roles and shared memory of the walk that makes dq, dk and dv.
#pragma once

#include "delta_rule/backward/token_sums.cuh"
#include "delta_rule/scores.cuh"
#include "delta_rule/walk.cuh"
#include "sequence/gradient_walk.cuh"

namespace tfla_tk::delta_rule {

// kDecays: also leaves the sums for dg.
template <class Type, bool kDecays> struct GradientsConfig {
    using T = Type;
    static constexpr int kDimK = 128, kDimV = 128;  // tiles
    static constexpr int kWalkers = 2;              // warpgroups with 64 columns of V each
    static constexpr bool kBackward = true, kStatesAlone = false, kMakesSums = kDecays;
    static constexpr bool kHasScorer = true;  // in the sense that P is not loaded
    static constexpr int kStages = 2;         // chunks in shared memory
    static constexpr int kWarpgroups = 2 + kWalkers, kThreads = 128 * kWarpgroups;
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static constexpr int kProducerRegisters = 32, kWalkerRegisters = 160, kKeysRegisters = 160;
    static_assert(kProducerRegisters + kWalkers * kWalkerRegisters + kKeysRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;     // tokens
    using State = PanelTile<T, kDimV, kDimK>;     // transposed: rows are columns of V
    using Square = PanelTile<T, kChunk, kChunk>;  // scores
};

struct GradientsGlobals : WalkGlobals {
    TensorMap dout, writes;    // boxes of a chunk
    TensorMap states;          // boxes of a state
    ResultMaps dq, dk;         // where V is one slice
    float *dq_sums, *dk_sums;  // else: what slices have added up so far
    int* turns;                // see turns.cuh; null where V is one slice
    ResultMaps dv;
    int slices;                // of V
    int64_t rows, chunk_rows;  // batch * heads * seq, batch * heads * slots
    float* strengths;          // [V / 16, rows]: sums for dbeta
    float* token_sums;         // [3 slices, rows]: q.dq; k.left - k.right; of k.right what goes through dS
    float* flows;              // [parts, batch * heads, slots]: e^{b_L} <S, dS> of each chunk
};

// The task of a CTA: a segment of a sequence, a head, a slice of V.
struct GradientsTask : WalkTask {
    int slice;
    int64_t batch_head;

    // Called by whole warps.
    template <class C> __device__ static inline GradientsTask of_block(const GradientsGlobals& g, int block) {
        const WalkTask task = WalkTask::of_block<C>(g, block);
        return {task, task.column / C::kDimV, static_cast<int64_t>(task.batch) * g.heads + task.head};
    }
};

// Of a chunk's tokens.
struct GradientsGates {
    Log2Decay log2_decay;  // b
    float read[kChunk];    // e^b
    float kept[kChunk];    // e^{b_L - b}
    float beta[kChunk];
    float decay;  // e^{b_L}
};

template <class C> struct GradientsMemory {
    typename C::Tile queries[C::kStages];  // then dq, until it is stored
    typename C::Tile keys[C::kStages];     // then dk
    typename C::Tile writes[C::kStages];
    typename C::Tile douts[C::kStages];  // dO, then dV
    typename C::State state;             // S^T that enters the chunk
    typename C::State gradient;          // dS^T that leaves the chunk, rounded
    typename C::Square p, reads, erasures, a;
    GradientsGates gates[C::kStages];
    // of each stage
    semaphore arrived[C::kStages];  // queries, keys, writes, dO
    semaphore gates_ready[C::kStages];
    semaphore free[C::kStages];                                 // writes and gates are not needed any more
    semaphore dout_read[C::kStages];                            // by the warpgroup of the keys
    semaphore queries_read[C::kStages], keys_read[C::kStages];  // by the walkers
    semaphore dv_ready[C::kStages];                             // for the warpgroup of the keys
    semaphore dv_done[C::kStages];                              // may be stored and then replaced
    semaphore dq_dk_ready[C::kStages];
    // of places that there are once
    semaphore state_arrived, state_free;
    semaphore gradient_ready, gradient_free;
    semaphore a_arrived, a_free;
    semaphore reads_ready, reads_free;
    semaphore erasures_ready, erasures_free;
    semaphore tail_landed[3];  // of each loading warp
    GradientsTask task;

    __device__ inline void init_barriers() {
        constexpr int kOfWalkers = 4 * C::kWalkers, kOfKeys = 4, kAll = kOfWalkers + kOfKeys;
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 4);
            init_warp_barrier(gates_ready[i], 1);
            init_warp_barrier(free[i], kAll);
            init_warp_barrier(dout_read[i], kOfKeys);
            init_warp_barrier(queries_read[i], kOfWalkers);
            init_warp_barrier(keys_read[i], kOfWalkers);
            init_warp_barrier(dv_ready[i], kOfWalkers);
            init_warp_barrier(dv_done[i], kAll);
            init_warp_barrier(dq_dk_ready[i], kOfKeys);
        }
        init_semaphore(state_arrived, 1);
        init_warp_barrier(state_free, kOfKeys);
        init_warp_barrier(gradient_ready, kOfWalkers);
        init_warp_barrier(gradient_free, kOfKeys);
        init_semaphore(a_arrived, 1);
        init_warp_barrier(a_free, kOfWalkers);
        init_warp_barrier(reads_ready, kOfWalkers);
        init_warp_barrier(reads_free, kOfKeys);
        init_warp_barrier(erasures_ready, kOfWalkers);
        init_warp_barrier(erasures_free, kOfKeys);
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::delta_rule
