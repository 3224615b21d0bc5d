// Rows of the forward: causal gating of scores, the normaliser, and the per-token outputs for the backward.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"

namespace tfla_tk::mlstm {

// P = 2^{column - row} S, causal, for a lane's two rows `row` and `row + 8` of a chunk, and its row sums.
struct ScoreGate {
    float2 reference;  // of both rows
    int lane_column;
    int diagonal;  // relative to the lane's column, so that columns are compared with immediates
    float2 sums;

    // sums: initial value of the row sums, this lane's part.
    __device__ inline ScoreGate(const GateStage& gates, int row, int lane, float2 sums)
        : reference{gates.row[row], gates.row[row + 8]},
          lane_column(2 * (lane % 4)),
          diagonal(row - lane_column),
          sums(sums) {}

    // upper, lower: S of the two rows at the lane's two columns of the eight from `column` on; replaced by P.
    // kInPlace: as in `gated`.
    template <bool kInPlace = false>
    __device__ inline void apply(float2& upper, float2& lower, const GateStage& gates, int column) {
        const float4 a = *reinterpret_cast<const float4*>(&gates.column[column + lane_column]);
        upper.x = gated<kInPlace>(upper.x, a.x, a.y, reference.x, column <= diagonal);
        upper.y = gated<kInPlace>(upper.y, a.z, a.w, reference.x, column + 1 <= diagonal);
        lower.x = gated<kInPlace>(lower.x, a.x, a.y, reference.y, column <= diagonal + 8);
        lower.y = gated<kInPlace>(lower.y, a.z, a.w, reference.y, column + 1 <= diagonal + 8);
        sums.x += upper.x + upper.y;
        sums.y += lower.x + lower.y;
    }
    __device__ inline float2 row_sums() const { return {quad_sum(sums.x), quad_sum(sums.y)}; }
};

// Stores x for rows t and t + 8, by the first of the four lanes that hold it, if stores().
template <class Stores>
__device__ inline void store_row_pair(const Globals& g, const Task& task, float* rows, int t, float2 x,
                                      Stores stores) {
    if (!stores() || laneid() % 4 != 0) return;
    rows = task.rows_of_head(g, rows);
    if (t < task.tokens) rows[t] = x.x;
    if (t + 8 < task.tokens) rows[t + 8] = x.y;
}

// The factor on the outputs of rows `row` and `row + 8` of a chunk: 1 / w_t; for gates that are not
// stabilised times the row's unit.
//
// unit: GateStage::unit of the rows. sums: row sums of P plus inter q n. stores(): whether this CTA stores
// d_t of these rows; one CTA per head does.
template <class C, class Stores>
__device__ inline float2 row_factor(const Globals& g, const Task& task, int chunk, float2 unit, int row,
                                    float2 sums, Stores stores) {
    const float2 one{1.f, 1.f};
    float2 factor = is_stabilised(g.gate_kind) ? one : unit;
    if constexpr (C::kNormalize) {
        const float2 d{factor.x * sums.x, factor.y * sums.y};
        if (g.row_n) store_row_pair(g, task, g.row_n, chunk * kChunk + row, d, stores);
        const float2 floor = is_stabilised(g.gate_kind) ? unit : one;
        factor.x /= row_normaliser(d.x, floor.x, g.eps);
        factor.y /= row_normaliser(d.y, floor.y, g.eps);
    }
    return factor;
}

// Stores m_t of the lane's two tokens of a chunk, by one warp of one CTA per head.
__device__ inline void store_row_stabilisers(const Globals& g, const Task& task, int chunk, float2 m) {
    if (!g.row_m || task.column != 0) return;
    float* rows = task.rows_of_head(g, g.row_m) + chunk * kChunk;
    const int t = 2 * fresh_laneid(), tokens = task.tokens - chunk * kChunk;
    if (t < tokens) rows[t] = m.x;
    if (t + 1 < tokens) rows[t + 1] = m.y;
}

// Stores m of the last state, given in log2 units, by one warp of one CTA per head.
__device__ inline void store_last_stabiliser(const Globals& g, const Task& task, FloatPair m) {
    if (!g.last.m || !task.last || task.column != 0 || fresh_laneid() != 0) return;
    g.last.m[task.index] =
        task.chunks == 0 ? task.initial_m(g) : static_cast<float>(static_cast<double>(m) * kLn2);
}

}  // namespace tfla_tk::mlstm
