// Tiles, warpgroup roles, register split and shared-memory plan of the fused forward at K = 256.
#pragma once

#include "common/sync.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/globals.cuh"
#include "scalar_gate/forward/transposed/fp16_row_scaling.cuh"
#include "scalar_gate/forward/transposed/state_exponent.cuh"
#include "scalar_gate/forward/transposed/value_rounding.cuh"
#include "scalar_gate/shared_scores.cuh"

namespace tfla_tk::mlstm {

// Registers per thread of each role; they sum to at most 512 over the warpgroups, 65536 / 128 threads.
struct TransposedRegisters {
    int producer, scores, state;
};

// b and a of a chunk's tokens (gate/gates.cuh), from the first gate warp to the second.
struct GateSums {
    TwoPairs b[kChunk / 2], a[kChunk / 2];
};

// kStabilised: the exponential gate; else the sigmoid one or without a normaliser a scalar decay.
template <class T_, int kDimQK_, int kSliceV_, bool kNormalize_, bool kStabilised_> struct TransposedConfig {
    using T = T_;
    static constexpr int kDimQK = kDimQK_;    // K, padded to the tile
    static constexpr int kSliceV = kSliceV_;  // columns of V, rows of C^T, that one CTA owns
    static constexpr bool kNormalize = kNormalize_;
    static constexpr bool kStabilised = kStabilised_;
    static_assert(kDimQK == 256 && (kSliceV == 64 || kSliceV == 128));
    static_assert(kNormalize || !kStabilised, "a stabilised gate comes with a normaliser");

    // Warpgroups: 0 is the producer (warps 1 and 2 the first two steps of the gates, warp 0 loads of Q and K
    // and the gates' last step, warp 3 loads of V and stores of h), 1 makes the scores and carries n, the
    // others hold the state, 64 columns of V each.
    static constexpr int kStateWarpgroups = kSliceV / 64, kStateWarps = 4 * kStateWarpgroups;
    static constexpr int kThreads = 128 * (2 + kStateWarpgroups);
    static constexpr int kTurnThreads = 128 * (1 + kStateWarpgroups);
    static constexpr TransposedRegisters kRegisters =
        kStateWarpgroups == 2 ? TransposedRegisters{32, 64, 208}    // registers: the state takes 128
                              : TransposedRegisters{48, 208, 240};  // smem: one CTA per SM

    // The state's columns, K, are split in two, since a wgmma with N = 256 does not compile for 512 threads
    // (C7602).
    static constexpr int kPart = 128, kParts = kDimQK / kPart;
    static constexpr int kPartPanels = kPart / kPanelColumns;
    // A fragments of a state warpgroup, 16 columns of the state each: one is filled while the others are read
    // by GEMMs. The update reuses their registers for V.
    static constexpr int kFragments = std::is_same_v<T, bf16> || kSequential ? 3 : 4;
    static_assert(kFragments >= 3, "V has two of them as it is, one scaled");

    // Whether rows that the gates make too small for fp16 are scaled up (fp16_row_scaling.cuh).
    static constexpr bool kHoldsRowsLarger = !std::is_same_v<T, bf16>;

    // Whether scores are gated in place (`gated`). NOTES: without it the sequential kernels spill.
    static constexpr bool kGatesInPlace = kHoldsRowsLarger && kSequential;

    // Scores are computed one chunk ahead of the state. A chunk's keys are used until its end, its queries
    // only early in it, so keys have three stages. Gates have as many as fit.
    static constexpr int kKeyStages = 3, kStages = 2, kGateStages = kNormalize ? 3 : 4, kSumStages = 2;
    __device__ static inline auto key_tile(int chunk) { return Use<kKeyStages>(chunk); }
    __device__ static inline auto tile(int chunk) { return Use<kStages>(chunk); }  // of queries, of values
    __device__ static inline auto gate_stage(int chunk) { return Use<kGateStages>(chunk); }
    __device__ static inline auto sum_stage(int chunk) { return Use<kSumStages>(chunk); }

    // CTAs of a cluster that shares its scores. Each CTA computes its own where kSequential and where the
    // number of slices is odd.
    static int cluster(int slices) { return kSequential ? 1 : ScoreTurns::cluster(slices); }

    // Eight rows after a tile's keys, which the GEMM of the scores reads too; two hold n as a high and a low
    // part.
    static constexpr int kNormRows = kNormalize ? 8 : 0;
    using T2 = typename base_types::packing<T>::packed_type;
    using Owed =
        std::conditional_t<std::is_same_v<T, bf16> || kStabilised, DeferredDecay<T>, FollowedWeights>;
    using Stage = TransposedStage<T2>;
    using KeyTile = PanelTile<T, kChunk, kDimQK, kNormRows>;
    using QueryTile = PanelTile<T, kChunk, kDimQK>;
    using ValueTile = PanelTile<T, kChunk, kSliceV>;
    using ScoreTile = PanelTile<T, kChunk, kChunk>;
};

// Operand of the sums of scaled keys: key_scale of a chunk's tokens times kUnit, as rows kHigh (high part)
// and kLow (low part) of blocks of eight tokens; the other rows are 0. Eight rows from kHigh - 2 p on then
// have the weights in places 2 p and 2 p + 1, the columns of the accumulator for panel p of K^T. An operand
// that starts past row 0 runs into the zeros of the next block, so there is one block more than tokens fill.
template <class T> struct alignas(128) NormWeights {
    static constexpr float kUnit = std::is_same_v<T, bf16> ? 1.f : 16384.f;  // fp16: weights down to 2^-28
    static constexpr int kHigh = 6, kLow = kHigh + 1, kRows = OperandRows16B::kRows;
    T data[kChunk / 8 + 1][kRows][8];
};

// The index of the completion of scores_free, in the CTA that makes a chunk's scores, after which their place
// is free.
__device__ inline int scores_freed(int chunk) { return (chunk - 1) >> (cluster_ctas() - 1); }

// All shared memory of a CTA.
template <class C> struct TransposedMemory {
    typename C::KeyTile keys[C::kKeyStages];
    typename C::QueryTile queries[C::kStages];
    typename C::ValueTile values[C::kStages];  // then h, staged for TMA stores
    typename C::ScoreTile scores;              // P / w
    alignas(16) float read_factors[kChunk];    // factor on C^T q: inter / w
    typename C::Stage gates[C::kGateStages];
    NormWeights<typename C::T> norm_weights[C::kNormalize ? C::kGateStages : 0];
    GateSums gate_sums[C::kSumStages];
    Task task;

    semaphore tiles_arrived[C::kKeyStages];  // keys and queries, and the chunk's gates
    semaphore keys_free[C::kKeyStages], queries_free[C::kStages];
    semaphore values_arrived[C::kStages];
    // with read_factors. scores_free counts the state warps of all CTAs; it lives in the CTA that makes the
    // next scores
    semaphore scores_ready, scores_free;
    semaphore gates_ready[C::kGateStages], gates_free[C::kGateStages];
    semaphore sums_ready[C::kSumStages], sums_free[C::kSumStages];
    semaphore out_ready[C::kStages][C::kStateWarpgroups];
    semaphore tail_landed, value_tail_landed;  // a tile whose last rows are still to be zeroed

    // Every warp that reads a buffer arrives on its *_free barrier. Values have none: the warp that stores h
    // out of their place loads the next ones there.
    __device__ inline void init_barriers() {
        auto init = [](auto& ready, auto& free, int ready_warps, int reader_warps) {
            for (auto& barrier : ready) init_warp_barrier(barrier, ready_warps);
            for (auto& barrier : free) init_warp_barrier(barrier, reader_warps);
        };
        for (int stage = 0; stage < C::kKeyStages; stage++) {
            init_semaphore(tiles_arrived[stage], 2 + kArrivalsPerWarp);
            init_warp_barrier(keys_free[stage], 4 + C::kStateWarps);
        }
        for (int stage = 0; stage < C::kStages; stage++) {
            init_warp_barrier(queries_free[stage], 4 + C::kStateWarps);
            init_semaphore(values_arrived[stage], 1);
            for (auto& barrier : out_ready[stage]) init_warp_barrier(barrier, 4);
        }
        init_warp_barrier(scores_ready, 4);
        init_warp_barrier(scores_free, C::kStateWarps * cluster_ctas());
        init(gates_ready, gates_free, 1, 4 + C::kStateWarps);
        init(sums_ready, sums_free, 1, 1);
        init_semaphore(tail_landed, 1);
        init_semaphore(value_tail_landed, 1);
        publish_barriers();
    }
};

// The factor on the state in registers after the last chunk.
template <class C> __device__ inline float last_unit(const TransposedMemory<C>& smem) {
    const int chunks = smem.task.chunks;
    if (!C::Owed::kFollowsWeights || chunks == 0) return 1.f;
    return exp2f(smem.gates[C::gate_stage(chunks - 1).slot].log2_unit);
}

}  // namespace tfla_tk::mlstm
