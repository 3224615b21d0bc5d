// Arguments, tiles, warpgroup roles, register split and shared-memory plan of the mLSTM backward's passes.
#pragma once

#include "kittens.cuh"
#include "mlstm_pass_gates.cuh"
#include "tfla_tk/params_pass.h"
#include "tfla_tk/segments.cuh"
#include "tfla_tk/sync.cuh"
#include "tfla_tk/tma.cuh"

namespace tfla_tk::mlstm {

using namespace kittens;

struct PassGlobals {
    TensorMap queries, keys, values, factor;
    TensorMap out, out_row;  // boxes of 16 rows and of one
    Gate i, f;
    const float *log2_w, *e;
    const double* chunk_m;
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    float *whole, *inter;
    void* states;
    float* flows;
    int flow_parts;
    Cut cut;
    int batch, heads, seq, slots, anchor_slots, dim_keys, dim_values, slices;
    float scale;
    double log2_scale;
    bool sigmoid_gate;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// The (sequence, head, slice of the values) of a CTA; slices of one head are neighbours.
struct PassTask {
    int batch, head, column;  // column: first of the values
    int first_row, tokens;    // tokens < 0: nothing to do
    int chunks;
    int64_t batch_head;  // batch * heads + head
    int slot;            // of the first chunk, of chunk_slots
    int64_t row;         // of [B, H, S] vectors: the first
    int64_t state;       // sequence * heads + head

    // The anchor before a chunk, counted through all heads.
    __device__ inline int64_t anchor(const PassGlobals& g, int chunk) const {
        return batch_head * g.anchor_slots + (slot + chunk) / kAnchorChunks;
    }

    // Called by whole warps.
    template <class C> __device__ static inline PassTask of_block(const PassGlobals& g, int block) {
        const int pair = block / g.slices, head = pair % g.heads;
        const Segment s = find_segment(g.cut, g.seq, pair / g.heads);
        const int batch = g.packed() ? 0 : s.sequence;
        const int64_t batch_head = static_cast<int64_t>(batch) * g.heads + head;
        return {batch,
                head,
                block % g.slices * C::kSlice,
                s.first_row,
                s.tokens,
                (s.tokens + kChunk - 1) / kChunk,
                batch_head,
                g.packed() ? s.first_row / kChunk + s.sequence : 0,
                batch_head * g.seq + s.first_row,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

// Registers per thread of each role; a column of the register file has 512, 65536 / (128 threads).
struct PassRegisters {
    int producer, scores, state;
};

struct PassTiling {
    int stages, gate_stages;
    int fragments;  // of 16 columns of a state warpgroup's A operand
    int ctas_per_sm;
    PassRegisters registers;
};

// One row per (columns of the keys, slice of the values). The comment names what limits the row.
constexpr PassTiling pass_tiling(int dim_keys, int slice) {
    if (dim_keys == 256 && slice == 128)
        return {2, 3, 2, 1, {32, 80, 200}};  // registers: the state takes 128
    if (dim_keys == 128 && slice == 256)
        return {2, 3, 2, 1, {32, 80, 200}};                // registers: the state takes 128
    if (slice == 64) return {2, 3, 4, 1, {48, 208, 240}};  // smem: one CTA per SM
    return {2, 3, 4, 1, {48, 112, 176}};                   // smem: one CTA per SM
}

// The row sums of dq and dk need registers that slices of 256 do not leave.
constexpr bool pass_serves(int slice, Gradient gradient) { return slice < 256 || gradient == Gradient::dv; }

template <class T_, int kDimKeys_, int kSlice_, Gradient kGradient_> struct PassConfig {
    using T = T_;
    static constexpr int kDimKeys = kDimKeys_;  // columns of queries and keys, padded to the tile
    static constexpr int kSlice = kSlice_;      // columns of the values and of the state that one CTA owns
    static constexpr Gradient kGradient = kGradient_;
    static constexpr bool kBackward = kGradient != Gradient::dq;    // in time
    static constexpr bool kNormalizer = kGradient != Gradient::dv;  // e and n take part
    static constexpr PassTiling kTiling = pass_tiling(kDimKeys, kSlice);

    // Warpgroups: 0 feeds the others (warp 0 TMA, warps 1 and 2 gates), 1 makes the scores, then the state's.
    static constexpr int kStateWarpgroups = kSlice == 64 ? 1 : 2;
    static constexpr int kStateWarps = 4 * kStateWarpgroups;
    static constexpr int kThreads = 128 * (2 + kStateWarpgroups);

    // The transposed state of a warpgroup: blocks of 64 rows (columns of the values), in parts of at most 128
    // columns (of the keys), since a wgmma with N = 256 does not compile in a launch of 512 threads.
    static constexpr int kBlocks = kSlice / 64 / kStateWarpgroups;
    static constexpr int kPart = kDimKeys == 256 ? 128 : kDimKeys;
    static constexpr int kParts = kDimKeys / kPart;
    static constexpr int kFragments = kTiling.fragments;
    static_assert(kFragments == 2 || kFragments == kChunk / 16);

    // An anchor: the state as operands of its GEMM, a unit of one thread at a time, then n.
    using AnchorUnit = uint4;
    static constexpr int64_t kAnchorBytes =
        static_cast<int64_t>(kSlice) * (kDimKeys * sizeof(T) + sizeof(float));

    // Chunk of a step, and ring positions of a step.
    __device__ static inline int chunk(const PassTask& task, int step) {
        return kBackward ? task.chunks - 1 - step : step;
    }
    __device__ static inline auto tile(int step) { return Use<kTiling.stages>(step); }
    __device__ static inline auto factor(int step) { return Use<1>(step); }
    __device__ static inline auto gate_sums(int step) { return Use<2>(step); }
    __device__ static inline auto gate_stage(int step) { return Use<kTiling.gate_stages>(step); }

    using KeyTile = PanelTile<T, kChunk, kPart>;
    using ValueTile = PanelTile<T, kChunk, kSlice>;
    using ScoreTile = PanelTile<T, kChunk, kChunk>;
    using OutTile = PanelTile<T, kChunk, 64>;
};

// Row sums of out . factor by the warps of a state warpgroup, each over its own 16 columns.
struct WarpRowSums {
    float whole[4][kChunk], inter[4][kChunk];
};

// All shared memory of a CTA.
template <class C> struct PassMemory {
    typename C::KeyTile keys[C::kTiling.stages][C::kParts];
    typename C::KeyTile queries[C::kTiling.stages][C::kParts];
    typename C::ValueTile values[C::kTiling.stages];
    typename C::ScoreTile scores[C::kTiling.stages];  // gated
    typename C::ValueTile factor[C::kNormalizer ? 1 : 0];
    typename C::OutTile out[C::kStateWarpgroups];  // on its way to global memory
    WarpRowSums sums[C::kNormalizer ? C::kStateWarpgroups : 0];
    float norm[C::kSlice];  // n of the values' columns
    PassStage gates[C::kTiling.gate_stages];
    PassSums gate_sums[2];
    PassTask task;

    semaphore keys_arrived[C::kTiling.stages][C::kParts], keys_free[C::kTiling.stages][C::kParts];
    semaphore queries_arrived[C::kTiling.stages][C::kParts], queries_free[C::kTiling.stages][C::kParts];
    semaphore values_arrived[C::kTiling.stages], values_free[C::kTiling.stages];
    semaphore scores_ready[C::kTiling.stages], scores_free[C::kTiling.stages];
    semaphore factor_arrived[1], factor_free[1];
    semaphore gates_ready[C::kTiling.gate_stages], gates_free[C::kTiling.gate_stages];
    semaphore sums_ready[2], sums_free[2];
    semaphore tail_landed;  // a tile whose last rows are still to be zeroed

    // Every warp that reads a buffer arrives on its *_free barrier.
    __device__ inline void init_barriers() {
        constexpr int kByTma = 0;
        auto init = [](auto& ready, auto& free, int ready_warps, int reader_warps) {
            for (auto& barrier : ready)
                ready_warps == kByTma ? init_semaphore(barrier, 1) : init_warp_barrier(barrier, ready_warps);
            for (auto& barrier : free) init_warp_barrier(barrier, reader_warps);
        };
        for (int stage = 0; stage < C::kTiling.stages; stage++) {
            init(keys_arrived[stage], keys_free[stage], kByTma, 4 + C::kStateWarps);
            init(queries_arrived[stage], queries_free[stage], kByTma, 4 + C::kStateWarps);
        }
        init(values_arrived, values_free, kByTma, C::kStateWarps);
        init(scores_ready, scores_free, 4, C::kStateWarps);
        init(factor_arrived, factor_free, kByTma, C::kStateWarps);
        init(gates_ready, gates_free, 1, 4 + C::kStateWarps);
        init(sums_ready, sums_free, 1, 1);
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

}  // namespace tfla_tk::mlstm
