// The matrices A and P of one chunk (bindings/params.h), by one warpgroup, from q, k and the gates in shared
// memory:
//   1. Issue K K^T and Q K^T, in flight together.
//   2. L = e^{b_i - b_j} K K^T, times beta, to shared memory; P = s e^{b_i - b_j} Q K^T, rounded, stays in
//      registers.
//   3. A = (I + L)^{-1}, in the place of L (triangular_inverse.cuh).
//   4. Round A, and store both tiles.
#pragma once

#include "common/register_steps.cuh"
#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/warp.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/chunk_matrices/triangular_inverse.cuh"
#include "delta_rule/gates.cuh"
#include "delta_rule/scores.cuh"

namespace tfla_tk::delta_rule {

// What of the gates the matrices depend on. A part is a quarter of the chunk, 16 tokens.
struct MatrixGates {
    static constexpr int kPart = 16;
    alignas(16) float2 log2_decay[kChunk];  // b, as high and low part
    float beta[kChunk];
    float to_part_end[kChunk];  // e^{b' - b}, b' of the last token of the token's part

    // Of the lane's tokens 2 l and 2 l + 1.
    __device__ inline void write(int lane, const TwoPairs& cumulative, float2 betas) {
        const auto [x, y] = cumulative;
        const FloatPair end = of_lane(y, lane / (kPart / 2) * (kPart / 2) + kPart / 2 - 1);
        write_log2_decay(log2_decay, lane, cumulative);
        write_pair(beta, 2 * lane, betas);
        write_pair(to_part_end, 2 * lane, {exp2f(rounded_sum(end, -x)), exp2f(rounded_sum(end, -y))});
    }
};

// Gates and masks the scores of a lane's two rows, in the layout of an accumulator: L from k.k and P from
// q.k. beta multiplies L by rows, or both by columns.
template <bool kBetaOnRows> struct GatedRows {
    static constexpr int kPart = MatrixGates::kPart;
    const MatrixGates& gates;
    int first_row, first_column;
    float scale;
    int tokens;
    float2 b[2];
    float beta[2];

    __device__ inline GatedRows(const MatrixGates& gates, int first_row, int first_column, float scale,
                                int tokens)
        : gates(gates), first_row(first_row), first_column(first_column), scale(scale), tokens(tokens) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            b[r] = gates.log2_decay[first_row + 8 * r];
            beta[r] = kBetaOnRows ? gates.beta[first_row + 8 * r] : 1.f;
        }
    }
    // Of data[k] of the j-th 16 columns.
    __device__ inline int row(int k) const { return first_row + 8 * (k % 2); }
    __device__ inline int column(int j, int k) const { return first_column + kPart * j + 8 * (k / 2); }
    __device__ inline bool inside(int r) const { return first_row + 8 * r < tokens; }

    // Columns of a part before the rows' own: e^{b_i - b_j} = e^{b_i - b'} e^{b' - b_j} with b' of the part's
    // last token, where neither factor exceeds 1.
    __device__ inline void gate_before(float2 (&of_keys)[4], float2 (&of_queries)[4], int j) const {
        const float2 end = gates.log2_decay[kPart * j + kPart - 1];
        float since[2];
#pragma unroll
        for (int r = 0; r < 2; r++) since[r] = inside(r) ? exp2f((b[r].x - end.x) + (b[r].y - end.y)) : 0.f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 by = *reinterpret_cast<const float2*>(&gates.to_part_end[column(j, 2 * half)]);
            if (!kBetaOnRows) {
                const float2 betas = *reinterpret_cast<const float2*>(&gates.beta[column(j, 2 * half)]);
                by = {by.x * betas.x, by.y * betas.y};
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float2 &x = of_keys[2 * half + r], &y = of_queries[2 * half + r];
                const float of_l = since[r] * beta[r], of_p = since[r] * scale;
                x = {of_l * by.x * x.x, of_l * by.y * x.y};
                y = {of_p * by.x * y.x, of_p * by.y * y.y};
            }
        }
    }
    // The part of the rows themselves.
    __device__ inline void gate_diagonal(float2 (&of_keys)[4], float2 (&of_queries)[4], int j) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int first = column(j, 2 * half);
            const float4 before = *reinterpret_cast<const float4*>(&gates.log2_decay[first]);
            float2 betas{1.f, 1.f};
            if (!kBetaOnRows) betas = *reinterpret_cast<const float2*>(&gates.beta[first]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float2 &x = of_keys[2 * half + r], &y = of_queries[2 * half + r];
                const int last = inside(r) ? first_row + 8 * r : -1;  // the last column that the row sees
                auto gated = [&](float& of_k, float& of_q, float high, float low, float beta_of_column,
                                 int column) {
                    const float gate = beta_of_column * exp2f((b[r].x - high) + (b[r].y - low));
                    of_k = column < last ? beta[r] * gate * of_k : 0.f;
                    of_q = column <= last ? scale * gate * of_q : 0.f;
                };
                gated(x.x, y.x, before.x, before.y, betas.x, first);
                gated(x.y, y.y, before.z, before.w, betas.y, first + 1);
            }
        }
    }
};

// Both matrices.
template <class Square> struct ChunkMatrices {
    Square a, p;
};

__device__ inline int warp_of_maker() { return fresh_thread() % 128 / 32; }

// Rounds A to a tile; two threads take a row.
template <class T, class Square>
__device__ inline void store_inverse(const TriangularMatrix& matrix, Square& a, int tokens) {
    using T2 = typename base_types::packing<T>::packed_type;
    const int lane = fresh_laneid(), warp = warp_of_maker();
    const int row = lane / 2, first_unit = lane % 2 * 4;
    const bool inside = 16 * warp + row < tokens;
    each<0, 4>([&](int i) {
        const int column = (first_unit + i) / 2, first = i % 2 * 8;  // of blocks; in the block
        T2 rounded[4];
        each<0, 4>([&](int n) {
            float2 pair{0.f, 0.f};
            if (inside && column <= warp)
                pair = *reinterpret_cast<const float2*>(&matrix.block(warp, column)[row][first + 2 * n]);
            rounded[n] = from_float2<T2>(pair);
        });
        store_shared(shared_address(&a) + panel_offset(16 * warp + row, first_unit + i), rounded);
    });
}

// beta_on_rows: as in DeltaMatricesParams. meet: waits for the other warps of the warpgroup. wait_free: until
// nobody reads what lies in the place of the matrices. tokens: of the chunk.
template <class T, int kDimK, bool kBetaOnRows, class Tile, class Square, class Meet, class WaitFree>
__device__ inline void make_matrices_of_chunk(const Tile& queries, const Tile& keys, const MatrixGates& gates,
                                              TriangularMatrix& matrix, ChunkMatrices<Square>& matrices,
                                              float scale, int tokens, Meet meet, WaitFree wait_free) {
    using T2 = typename base_types::packing<T>::packed_type;
    // NOTES: lane and warp are recomputed, to save registers
    const int lane = fresh_laneid(), warp = warp_of_maker();
    rt_fl<16, kChunk> of_keys, of_queries;
    rt<T, 16, kChunk> p;
    issue_scores<T, kDimK>(of_keys, keys, keys);  // 1
    issue_scores<T, kDimK>(of_queries, queries, keys);
    const GatedRows<kBetaOnRows> rows(gates, 16 * warp + lane / 4, 2 * (lane % 4), scale, tokens);
    warpgroup::mma_async_wait<0>();
    pin(of_keys), pin(of_queries);
    meet();  // the triangular matrix may lie where the tiles are
    auto store_block = [&](int j, const float2(&tile)[4]) {
        auto& block = matrix.block(warp, j);
        each<0, 4>([&](int k) {
            *reinterpret_cast<float2*>(&block[lane / 4 + 8 * (k % 2)][2 * (lane % 4) + 8 * (k / 2)]) =
                tile[k];
        });
    };
    auto round = [&](T2(&to)[4], const float2(&tile)[4]) {
        each<0, 4>([&](int k) { to[k] = from_float2<T2>(tile[k]); });
    };
    // NOTES: the diagonal part is moved to registers of its own, so that its code is there once: the code of
    // makers and walkers has to stay in the instruction cache
    float2 diagonal_keys[4], diagonal_queries[4];
    each<0, kChunk / 16>([&](int j) {  // 2
        auto& key_tile = of_keys.tiles[0][j].data;
        auto& query_tile = of_queries.tiles[0][j].data;
        if (j < warp) {
            rows.gate_before(key_tile, query_tile, j);
            store_block(j, key_tile);
        } else {
            if (j == warp)
                each<0, 4>(
                    [&](int k) { diagonal_keys[k] = key_tile[k], diagonal_queries[k] = query_tile[k]; });
            each<0, 4>([&](int k) { query_tile[k] = {0.f, 0.f}; });
        }
        round(p.tiles[0][j].data, query_tile);
    });
    rows.gate_diagonal(diagonal_keys, diagonal_queries, warp);
    store_block(warp, diagonal_keys);
    T2 diagonal[4];
    round(diagonal, diagonal_queries);
    each<0, kChunk / 16>([&](int j) {
        if (j == warp) each<0, 4>([&](int k) { p.tiles[0][j].data[k] = diagonal[k]; });
    });
    __syncwarp();
    invert_unit_lower(matrix, warp_of_maker(), fresh_laneid(), meet);  // 3

    wait_free();
    store_inverse<T>(matrix, matrices.a, tokens);  // 4
    store_panels<T, kChunk>(shared_address(&matrices.p), 16 * warp_of_maker(), p);
}

}  // namespace tfla_tk::delta_rule
