// Tiles, warpgroup roles, register split and shared-memory plan of the fused mLSTM forward at K = 256.
#pragma once

#include "common/sync.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/globals.cuh"
#include "scalar_gate/forward/transposed/fp16_row_scaling.cuh"
#include "scalar_gate/forward/transposed/state_exponent.cuh"
#include "scalar_gate/forward/transposed/value_rounding.cuh"
#include "scalar_gate/shared_scores.cuh"

namespace tfla_tk::mlstm {

// Registers per thread of each role; a column of the register file has 512, 65536 / (128 threads).
struct WideRegisters {
    int producer, scores, state;
};

// b and a of a chunk's tokens (gates.cuh), between the two warps of the gates.
struct GateSums {
    TwoPairs b[kChunk / 2], a[kChunk / 2];
};

template <class T_, int kDimQK_, int kSliceV_, bool kNormalize_, class Gate_, Schedule kSchedule_>
struct WideConfig {
    using T = T_;
    static constexpr int kDimQK = kDimQK_;    // K, padded to the tile
    static constexpr int kSliceV = kSliceV_;  // columns of V, rows of C^T, that one CTA owns
    static constexpr bool kNormalize = kNormalize_;
    using Gate = Gate_;  // a policy of gate_policy.cuh
    static constexpr Schedule kSchedule = kSchedule_;
    static_assert(kDimQK == 256 && (kSliceV == 64 || kSliceV == 128));
    static_assert(kNormalize || !Gate::kStabilised, "a stabilised gate comes with a normaliser");

    // Warpgroups: 0 feeds the others (warps 1 and 2 gates one after the other, warp 0 Q and K, and the gates'
    // last step, warp 3 V, and h on its way out), 1 makes the scores and carries n, then the state's, each
    // with 64 columns of V.
    static constexpr int kStateWarpgroups = kSliceV / 64, kStateWarps = 4 * kStateWarpgroups;
    static constexpr int kThreads = 128 * (2 + kStateWarpgroups);
    static constexpr int kTurnThreads = 128 * (1 + kStateWarpgroups);
    static constexpr WideRegisters kRegisters =
        kStateWarpgroups == 2 ? WideRegisters{32, 64, 208}    // registers: the state takes 128
                              : WideRegisters{48, 208, 240};  // smem: one CTA per SM

    // The state's columns, K, come in parts, since a wgmma with N = 256 does not compile in a launch of 512
    // threads.
    static constexpr int kPart = 128, kParts = kDimQK / kPart;
    static constexpr int kPartPanels = kPart / kPanelColumns;
    // Fragments of a state warpgroup's A operand, 16 columns of the state: one on its way and the others in
    // GEMMs. Then V takes their places.
    static constexpr int kFragments = std::is_same_v<T, bf16> || kSchedule == Schedule::sequential ? 3 : 4;
    static_assert(kFragments >= 3, "V has two of them as it is, one scaled");

    // Whether rows of h that gates make too small for fp16 are made larger at first (mlstm_wide_rows.cuh).
    static constexpr bool kHoldsRowsLarger = !std::is_same_v<T, bf16>;

    // Whether scores are gated in their own registers (`gated`). NOTES: these spill otherwise.
    static constexpr bool kGatesInPlace = kHoldsRowsLarger && kSchedule != Schedule::overlapped;

    // The scores are made a chunk ahead of the state, and a chunk's keys are free at its end, its queries
    // early in it: so there are three stages of keys. Gates take as many as there is memory for.
    static constexpr int kKeyStages = 3, kStages = 2, kGateStages = kNormalize ? 3 : 4, kSumStages = 2;
    __device__ static inline auto key_tile(int chunk) { return Use<kKeyStages>(chunk); }
    __device__ static inline auto tile(int chunk) { return Use<kStages>(chunk); }  // of queries, of values
    __device__ static inline auto gate_stage(int chunk) { return Use<kGateStages>(chunk); }
    __device__ static inline auto sum_stage(int chunk) { return Use<kSumStages>(chunk); }

    // CTAs of a cluster, which take turns at making scores. Where scores and state take turns each CTA makes
    // its own, and so it does where its slice has no neighbour.
    static int cluster(int slices) {
        return kSchedule == Schedule::sequential ? 1 : ScoreTurns::cluster(slices);
    }

    // Behind a tile's keys n as a high and a low part: two of eight rows more that the GEMM of the scores
    // reads.
    static constexpr int kNormRows = kNormalize ? 8 : 0;
    using T2 = typename base_types::packing<T>::packed_type;
    using Owed = std::conditional_t<std::is_same_v<T, bf16>, OwedDecay<T>,
                                    std::conditional_t<Gate::kStabilised, AheadOfDecay, FollowedWeights>>;
    using Stage = WideStage<T2>;
    using KeyTile = PanelTile<T, kChunk, kDimQK, kNormRows>;
    using QueryTile = PanelTile<T, kChunk, kDimQK>;
    using ValueTile = PanelTile<T, kChunk, kSliceV>;
    using ScoreTile = PanelTile<T, kChunk, kChunk>;
};

// key_scale of a chunk's tokens as a high and a low part, times kUnit, as two rows of an operand with zeros
// before and behind them: for panel p of K^T eight rows from kHigh - 2 p on have them in places 2 p and 2 p
// + 1. The zeros before eight tokens' rows are also those behind the rows of the eight before, so there is a
// block more than tokens fill.
template <class T> struct alignas(128) NormWeights {
    static constexpr float kUnit = std::is_same_v<T, bf16> ? 1.f : 16384.f;  // fp16: weights down to 2^-28
    static constexpr int kHigh = 6, kLow = kHigh + 1, kRows = OperandRows16B::kRows;
    T data[kChunk / 8 + 1][kRows][8];
};

// The completion of the maker's scores_free, from 0 on, by which a chunk's scores find their place free.
__device__ inline int scores_freed(int chunk) { return (chunk - 1) >> (cluster_ctas() - 1); }

// All shared memory of a CTA.
template <class C> struct WideMemory {
    typename C::KeyTile keys[C::kKeyStages];
    typename C::QueryTile queries[C::kStages];
    typename C::ValueTile values[C::kStages];  // then h, on its way to global memory
    typename C::ScoreTile scores;              // P, over the normaliser
    alignas(16) float read_factors[kChunk];    // of what a query gets of C^T: inter over the normaliser
    typename C::Stage gates[C::kGateStages];
    NormWeights<typename C::T> norm_weights[C::kNormalize ? C::kGateStages : 0];
    GateSums gate_sums[C::kSumStages];
    bool may_run_ahead;  // as RunAhead's last look finds
    Task task;

    semaphore tiles_arrived[C::kKeyStages];  // keys and queries, and the chunk's gates
    semaphore keys_free[C::kKeyStages], queries_free[C::kStages];
    semaphore values_arrived[C::kStages];
    semaphore scores_ready, scores_free;  // with their factors; free: in all CTAs, kept by the next maker
    semaphore gates_ready[C::kGateStages], gates_free[C::kGateStages];
    semaphore sums_ready[C::kSumStages], sums_free[C::kSumStages];
    semaphore out_ready[C::kStages][C::kStateWarpgroups];
    semaphore tail_landed, value_tail_landed;  // a tile whose last rows are still to be zeroed

    // Every warp that reads a buffer arrives on its *_free barrier; but the values' place is that of h, and
    // the warp that stores h loads them.
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
        init(gates_ready, gates_free, 1, 4 + C::kStateWarps + C::Owed::kRunsAhead);
        init(sums_ready, sums_free, 1, 1);
        init_semaphore(tail_landed, 1);
        init_semaphore(value_tail_landed, 1);
        publish_barriers();
    }
};

// What the state in registers is to be multiplied with after the last chunk.
template <class C> __device__ inline float last_unit(const WideMemory<C>& smem) {
    const int chunks = smem.task.chunks;
    if (!C::Owed::kFollowsWeights || chunks == 0) return 1.f;
    return exp2f(smem.gates[C::gate_stage(chunks - 1).slot].log2_unit);
}

}  // namespace tfla_tk::mlstm
