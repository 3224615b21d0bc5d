// Scores warpgroup of the forward at K = 256: scores and q n, the normaliser, P; n in registers.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/forward/rows.cuh"
#include "scalar_gate/forward/transposed/config.cuh"

namespace tfla_tk::mlstm {

// n in registers. A lane has two rows of one panel of K^T, in the layout of the accumulator of the key sums.
template <class C> struct CarriedNorm {
    using T = typename C::T;
    float2 n;

    __device__ static inline int panel() { return fresh_laneid() % 4; }
    __device__ static inline int row() {  // and + 8
        return fresh_thread() % 128 / 32 * 16 + fresh_laneid() / 4;
    }
    __device__ static inline int column() { return panel() * kPanelColumns + row(); }  // of K, and + 8

    __device__ inline void load(const float* initial, int dim_qk) {
        auto entry = [&](int at) { return initial && at < dim_qk ? initial[at] : 0.f; };
        n = {entry(column()), entry(column() + 8)};
    }
    __device__ inline void add(const float2 (&key_sums)[2], float decay) {
        constexpr float kUnit = 1.f / NormWeights<T>::kUnit;
        n = {decay * n.x + kUnit * (key_sums[0].x + key_sums[0].y),
             decay * n.y + kUnit * (key_sums[1].x + key_sums[1].y)};
    }
    __device__ inline void store(float* last, int dim_qk, float unit) const {
        if (column() < dim_qk) last[column()] = unit * n.x;
        if (column() + 8 < dim_qk) last[column() + 8] = unit * n.y;
    }

    // Writes n as a high and a low part to the rows after a stage's keys, for the GEMM of the scores.
    __device__ inline void publish(TransposedMemory<C>& smem, int slot) const {
        // One address serves all writes: a warp has two units of 16 bytes, and the swizzle swaps them in the
        // second row.
        auto* units = reinterpret_cast<unsigned char*>(smem.keys[slot].data[panel()]) +
                      panel_offset(kChunk, row() / 16 * 2) + row() % 8 * sizeof(T);
        auto write = [&](int part, int unit, T x) {
            *reinterpret_cast<T*>(units + part * kPanelColumns * sizeof(T) + (unit ^ part) * 16) = x;
        };
        auto write_parts = [&](int unit, float x) {
            const T high = base_types::convertor<T, float>::convert(x);
            const float rest = x - base_types::convertor<float, T>::convert(high);
            write(0, unit, high), write(1, unit, base_types::convertor<T, float>::convert(rest));
        };
        write_parts(0, n.x), write_parts(1, n.y);
        fence_async_proxy();
        named_sync<128>(NamedBarrier::norm_published);
    }
};

template <class C>
__device__ inline void make_transposed_scores(const Globals& g, TransposedMemory<C>& smem) {
    using T = typename C::T;
    using T2 = typename C::T2;
    constexpr int kSteps = C::kDimQK / 16;
    const Task& task = smem.task;
    auto warp_row = [] { return fresh_thread() % 128 / 32 * 16; };

    rt_fl<16, kChunk> scores;
    CarriedNorm<C> norm;
    float2 qn[2];        // first lane of every four: q times the high and the low part of n, for its two rows
    float2 key_sums[2];  // for the lane's two entries of n: by the high and the low part of the weights

    auto issue_scores = [&](int key_slot, int query_slot) {
        const auto keys = Operand128B::rows(&smem.keys[key_slot]);
        const auto queries = Operand128B::rows(&smem.queries[query_slot]);
        forget(scores);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
            const uint64_t a = queries.row_step(C::QueryTile::panel_bytes, k);
            const uint64_t b = keys.row_step(C::KeyTile::panel_bytes, k);
            if constexpr (C::kNormalize)
                wgmma_step_72<T>(scores, qn, a, b, k > 0);
            else
                wgmma_step<T, false>(scores, a, b, k > 0);
        }
        warpgroup::mma_commit_group();
    };
    // Sums of the scaled keys: K^T times the weights. One accumulator of 64 x 8 serves all four panels of
    // K^T. Each panel has two of its columns: in these its operand has the weights' high and low part, in the
    // others zeros. (So a NaN in K spreads to four entries of n.)
    auto issue_key_sums = [&](int key_slot, int gate_slot) {
        const OperandRows16B weights(&smem.norm_weights[gate_slot]);
        const auto keys = Operand128B::columns(&smem.keys[key_slot], C::KeyTile::panel_bytes);
        wgmma_fence();
#pragma unroll
        for (int panel = 0; panel < C::KeyTile::panels; panel++) {
            const int first_row = NormWeights<T>::kHigh - 2 * panel;
#pragma unroll
            for (int k = 0; k < kChunk / 16; k++)
                wgmma_step_8<T>(key_sums, keys.column_step(k, panel * C::KeyTile::panel_bytes),
                                weights.at(first_row, k), panel > 0 || k > 0);
        }
        warpgroup::mma_commit_group();
    };
    // Turns S into P in place and returns the row sums; sums: their initial value, this lane's part.
    auto gate_scores = [&](const GateStage& gates, float2 sums) {
        const int lane = fresh_laneid();
        ScoreGate gate(gates, warp_row() + lane / 4, lane, sums);
#pragma unroll
        for (int j = 0; j < scores.width; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                gate.template apply<C::kGatesInPlace>(scores.tiles[0][j].data[2 * half],
                                                      scores.tiles[0][j].data[2 * half + 1], gates,
                                                      16 * j + 8 * half);
            asm volatile("" ::: "memory");  // NOTES: loads gates when they are needed, to save registers
        }
        return gate.row_sums();
    };
    // Writes P times a factor per row, rounded, to shared memory.
    auto store_scores = [&](float2 factor) {
        const int lane = fresh_laneid();
        const uint32_t address =
            shared_address(&smem.scores) + panel_offset(warp_row() + lane % 16, lane / 16);
#pragma unroll
        for (int j = 0; j < scores.width; j++) {
            T2 x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 p = scores.tiles[0][j].data[k];
                const float s = k % 2 ? factor.y : factor.x;
                x[k] = from_float2<T2>({p.x * s, p.y * s});
            }
            move<T2>::stsm4(address ^ (j * 32), x[0], x[1], x[2], x[3]);
        }
    };
    // Copies this warp's rows of P and their factors to the other CTA.
    constexpr uint32_t kSentRows = 16 * kPanelColumns * sizeof(T), kSentFactors = 16 * sizeof(float);
    constexpr uint32_t kSentBytes = kSentRows + kSentFactors;
    auto send_scores = [&] {
        __syncwarp();
        if (cluster_ctas() == 1 || fresh_laneid() != 0) return;
        const int other = 1 - cta_in_cluster(), row = warp_row();
        send_to_cta(smem.scores.data[0][row], kSentRows, smem.scores_ready, other);
        send_to_cta(&smem.read_factors[row], kSentFactors, smem.scores_ready, other);
    };
    auto make_chunk = [&](int chunk) {
        const int query_slot = C::tile(chunk).slot;
        const typename C::Stage& gates = smem.gates[C::gate_stage(chunk).slot];
        if (kSequential && chunk > 0) named_sync<C::kTurnThreads>(NamedBarrier::gemm_turn);
        issue_scores(C::key_tile(chunk).slot, query_slot);
        warpgroup::mma_async_wait<0>();
        pin(scores);
        if constexpr (C::kNormalize) pin(qn);
        arrive_warp(smem.queries_free[query_slot]);
        const int lane = fresh_laneid(), row = warp_row() + lane / 4;
        const float2 inter{gates.inter[row], gates.inter[row + 8]};
        float2 of_norm{0.f, 0.f};  // inter q n, in the lanes that have q n
        if constexpr (C::kNormalize)
            if (lane % 4 == 0) of_norm = {inter.x * (qn[0].x + qn[0].y), inter.y * (qn[1].x + qn[1].y)};

        const float2 sums = gate_scores(gates, of_norm);
        const bool in_first_cluster = task.column < cluster_ctas() * C::kSliceV;
        // NOTES: recomputed, to save registers
        const typename C::Stage& same_gates = smem.gates[C::gate_stage(anew(chunk)).slot];
        const float2 unit{same_gates.unit[row], same_gates.unit[row + 8]};
        float2 factor = row_factor<C>(g, task, chunk, unit, row, sums, [&] { return in_first_cluster; });
        if constexpr (C::kHoldsRowsLarger) {
            factor.x *= held_larger(unit.x, !C::kStabilised);
            factor.y *= held_larger(unit.y, !C::kStabilised);
        }
        wait(smem.scores_free, scores_freed(chunk) & 1);
        if (lane % 4 == 0) {
            smem.read_factors[row] = same_gates.inter[row] * factor.x;
            smem.read_factors[row + 8] = same_gates.inter[row + 8] * factor.y;
        }
        store_scores(factor);
        fence_async_proxy();
        send_scores();
        arrive_warp(smem.scores_ready);
    };

    if constexpr (C::kNormalize) {
        norm.load(task.initial_n(g), g.dim_qk);
        if (ScoreTurns::makes(0)) norm.publish(smem, C::key_tile(0).slot);
    }
    for (int chunk = 0; chunk < task.chunks; chunk++) {
        const auto keys = C::key_tile(chunk);
        wait(smem.tiles_arrived[keys.slot], keys.phase);
        if (ScoreTurns::makes(chunk)) {
            make_chunk(chunk);
        } else {
            arrive_warp(smem.queries_free[C::tile(chunk).slot]);
            // wait for the phase of the chunk before, or this arrival would count for it
            if (chunk > 0) wait(smem.scores_ready, (chunk - 1) & 1);
            arrive_warp_expecting(smem.scores_ready, kSentBytes);
        }

        // NOTES: recomputed, since values kept over the gating cost registers
        const int same_chunk = anew(chunk);
        const int key_slot = C::key_tile(same_chunk).slot, gate_slot = C::gate_stage(same_chunk).slot;
        if constexpr (C::kNormalize) {
            // after P, which the state waits for; needed by the next chunk's scores
            issue_key_sums(key_slot, gate_slot);
            warpgroup::mma_async_wait<0>();
            pin(key_sums);
            norm.add(key_sums, smem.gates[gate_slot].decay);
            if (ScoreTurns::makes(chunk + 1)) norm.publish(smem, C::key_tile(chunk + 1).slot);
        }
        arrive_warp(smem.keys_free[key_slot]);
        arrive_warp(smem.gates_free[gate_slot]);
    }

    if constexpr (C::kNormalize)
        if (g.last.n && task.last && task.column == 0)
            norm.store(g.last.n + task.index * g.dim_qk, g.dim_qk, last_unit<C>(smem));
}

}  // namespace tfla_tk::mlstm
