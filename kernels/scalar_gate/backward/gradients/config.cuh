// Warpgroup roles and shared memory of the walk that makes dq, dk and dv at once.
#pragma once

#include "common/tile_loader.cuh"
#include "kittens.cuh"
#include "scalar_gate/backward/walk/gates.cuh"
#include "scalar_gate/bindings/params_backward.h"
#include "sequence/begin_task.cuh"
#include "sequence/gradient_walk.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::mlstm {

using namespace kittens;

struct GradientsRegisters {
    int producer, walkers, keys;
};

// kTile: columns of K and of V, padded. kNormalizer: e and n take part. kSums: leaves the sums for the
// gradients of the gates.
template <class T_, int kTile, bool kNormalizer_, bool kSums_> struct GradientsConfig {
    using T = T_;
    static constexpr int kDimK = kTile, kDimV = kTile;
    static constexpr bool kNormalizer = kNormalizer_, kSums = kSums_;
    static_assert(kSums || !kNormalizer);
    static constexpr int kWalkers = kDimV / kPanelColumns;  // warpgroups with 64 columns of V each
    static constexpr int kStages = 2;                       // chunks in shared memory
    static constexpr int kWarpgroups = 2 + kWalkers, kThreads = 128 * kWarpgroups;
    static constexpr GradientsRegisters kRegisters =
        kWalkers == 2 ? GradientsRegisters{32, 160, 160} : GradientsRegisters{40, 216, 248};
    // NOTES: together no more than the CTA has at its launch, or setmaxnreg waits forever
    static_assert(kRegisters.producer + kWalkers * kRegisters.walkers + kRegisters.keys <=
                  65536 / kThreads / 8 * 8 * kWarpgroups);

    using Tile = PanelTile<T, kChunk, kDimK>;     // tokens
    using State = PanelTile<T, kDimV, kDimK>;     // transposed: rows are columns of V
    using Square = PanelTile<T, kChunk, kChunk>;  // scores
};

// Fields as in MlstmGradientsParams of bindings/params_backward.h.
struct GradientsGlobals {
    TensorMap q, k, v, dh;  // boxes of a chunk
    TensorMap states;       // boxes of a state
    ResultMaps dq, dk, dv;
    const float *units, *norms;  // of the states
    const ChunkGates* gates;
    const float* e;
    Boundaries boundaries;
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    float *q_dq, *k_dk, *flows;
    Cut cut;
    int heads, group, seq, slots, state_slots, dim_k, dim_v;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// The (segment of a sequence, head) of a CTA.
struct GradientsTask {
    int batch, head, key_head;  // key_head: of q and k
    int first_row, tokens;      // tokens < 0: nothing to do
    int chunks;
    int first_state;     // slot of the state that enters the segment, counted over all heads
    int64_t first_slot;  // of the first chunk, counted over all heads
    int64_t row;         // the first one in [B, H, S] vectors
    // where the walk begins and ends: null is zero, or not wanted
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;

    // The state that a chunk's queries read enters the chunk itself or, of every second chunk, the one
    // before.
    __device__ static inline bool enters_with_state(int chunk) { return chunk % kStateChunks == 0; }
    __device__ inline int state_slot(int chunk) const { return first_state + chunk / kStateChunks; }
    // How many states the walk has used before this one.
    __device__ inline int states_before(int chunk) const {
        return (chunks - 1) / kStateChunks - chunk / kStateChunks;
    }
    // The first of the walk's chunks that reads a state.
    __device__ inline bool begins_state(int chunk) const {
        return chunk + 1 == chunks || (chunk + 1) % kStateChunks == 0;
    }

    // Whether the results of a chunk are this CTA's to store.
    __device__ static constexpr bool owns(int) { return true; }

    // Called by whole warps.
    template <class C> __device__ static inline GradientsTask of_block(const GradientsGlobals& g, int block) {
        const int segment = block / g.heads, head = block % g.heads;
        const Segment s = find_segment(g.cut, g.seq, segment);
        const int batch = g.packed() ? 0 : s.sequence;
        const int first_chunk = s.number * g.cut.segment_chunks, start = s.first_row - first_chunk * kChunk;
        const int64_t batch_head = static_cast<int64_t>(batch) * g.heads + head;
        const int states_before = g.packed() ? start / (kChunk * kStateChunks) + s.sequence : 0;
        const int64_t size = static_cast<int64_t>(g.dim_k) * g.dim_v;
        const int64_t state = static_cast<int64_t>(s.sequence) * g.heads + head;
        const float *entering_c = g.entering_c ? g.entering_c + state * size : nullptr,
                    *entering_n = g.entering_n ? g.entering_n + state * g.dim_k : nullptr;
        if (s.number + 1 < s.count) {  // over the boundary to the next segment
            const int64_t slot = static_cast<int64_t>(segment - s.sequence) * g.heads + head;
            entering_c = g.boundaries.c + slot * size;
            entering_n = g.boundaries.n ? g.boundaries.n + slot * g.dim_k : nullptr;
        }
        const bool ends = s.number == 0;
        return {batch,
                head,
                head / g.group,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                static_cast<int>(batch_head) * g.state_slots + states_before + first_chunk / kStateChunks,
                batch_head * g.slots + s.first_row / kChunk + (g.packed() ? s.sequence : 0),
                batch_head * g.seq + s.first_row,
                entering_c,
                entering_n,
                ends && g.leaving_c ? g.leaving_c + state * size : nullptr,
                ends && g.leaving_n ? g.leaving_n + state * g.dim_k : nullptr};
    }
};

// All shared memory of a CTA.
template <class C> struct GradientsMemory {
    typename C::Tile queries[C::kStages];  // then dk, until it is stored
    typename C::Tile keys[C::kStages];     // then dq
    typename C::Tile values[C::kStages];   // then dv
    typename C::Tile douts[C::kStages];    // dh
    typename C::State state;               // S^T that enters every second chunk
    typename C::State gradient;            // dS^T that leaves the chunk, rounded
    typename C::Square p[2];               // of every second chunk
    typename C::Square reads;
    ChunkGates gates[C::kStages];
    alignas(16) float e[C::kNormalizer ? C::kStages : 0][kChunk];
    float state_scale;                                               // of S^T and n
    alignas(16) float norm[C::kNormalizer ? C::kDimK : 0];           // n that enters with S
    alignas(16) float norm_gradient[C::kNormalizer ? C::kDimK : 0];  // dn that leaves the chunk
    alignas(16) float norm_weights[C::kNormalizer ? kChunk : 0];     // of the warp that carries dn
    // of each stage
    semaphore arrived[C::kStages];      // queries, keys, values, dh
    semaphore gates_ready[C::kStages];  // and e
    semaphore free[C::kStages];         // dh, gates and e are not needed any more
    semaphore qk_read[C::kStages];      // by all but the keys' warpgroup
    semaphore values_read[C::kStages];  // by the keys' warpgroup
    semaphore dq_dk_ready[C::kStages], dv_ready[C::kStages];
    // of places that there are once
    semaphore state_arrived, state_free;
    semaphore gradient_ready;  // free when values_read is
    semaphore norm_gradient_ready, norm_gradient_free;
    semaphore tail_landed[3];  // of each loading warp
    GradientsTask task;

    __device__ inline void init_barriers() {
        constexpr int kOfWalkers = 4 * C::kWalkers, kOfKeys = 4, kOfNorm = C::kNormalizer;  // warps
        for (int i = 0; i < C::kStages; i++) {
            init_semaphore(arrived[i], 4);
            init_warp_barrier(gates_ready[i], 1);
            init_warp_barrier(free[i], kOfWalkers + kOfKeys + 2 * kOfNorm);
            init_warp_barrier(qk_read[i], kOfWalkers + 2 * kOfNorm);
            init_warp_barrier(values_read[i], kOfKeys);
            init_warp_barrier(dq_dk_ready[i], kOfKeys);
            init_warp_barrier(dv_ready[i], kOfWalkers);
        }
        init_semaphore(state_arrived, 1);
        init_warp_barrier(state_free, kOfKeys + (C::kSums ? kOfWalkers + kOfNorm : 0));
        init_warp_barrier(gradient_ready, kOfWalkers);
        if constexpr (C::kNormalizer) {
            init_warp_barrier(norm_gradient_ready, kOfNorm);
            init_warp_barrier(norm_gradient_free, kOfKeys + kOfNorm);
        }
        for (auto& landed : tail_landed) init_semaphore(landed, 1);
        publish_barriers();
    }
};

// The gate s W_ij / w_i of a row i and two columns j side by side, the first one even.
__device__ inline float2 gates_between(const ChunkGates& gates, int row, int column) {
    const float2 receives = gates.receives[row];
    const float4 sends = *reinterpret_cast<const float4*>(&gates.sends[column]);
    return {pass_gate({sends.x, sends.y}, receives), pass_gate({sends.z, sends.w}, receives)};
}

}  // namespace tfla_tk::mlstm
