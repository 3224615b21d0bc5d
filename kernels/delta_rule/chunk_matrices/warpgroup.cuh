// The matrices A and P of one chunk (bindings/params.h), by one warpgroup, from q, k and the gates in shared
// memory:
//   1. Issue K K^T and Q K^T, in flight together.
//   2. L = e^{b_i - b_j} K K^T, times beta, to shared memory.
//   3. P = s e^{b_i - b_j} Q K^T, rounded, stays in registers.
//   4. A = (I + L)^{-1}, in the place of L (triangular_inverse.cuh).
//   5. Round A to a tile and store both tiles, which take that place.
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

// What of the gates the matrices depend on.
struct MatrixGates {
    alignas(16) float2 log2_decay[kChunk];  // b, as high and low part
    float beta[kChunk];

    // Of the lane's tokens 2 l and 2 l + 1.
    __device__ inline void write(int lane, const TwoPairs& cumulative, float2 betas) {
        write_log2_decay(log2_decay, lane, cumulative);
        write_pair(beta, 2 * lane, betas);
    }
};

// Both matrices, and before them L, which has padded rows of fp32 numbers.
template <class Square> struct ChunkMatrices {
    Square a, p;
    unsigned char padding[sizeof(TriangularMatrix) - 2 * sizeof(Square)];

    __device__ inline TriangularMatrix& triangular() { return reinterpret_cast<TriangularMatrix&>(*this); }
};

// beta_on_rows: as in DeltaMatricesParams. meet: waits for the other warps of the warpgroup. tokens: of the
// chunk.
template <class T, int kDimK, bool kBetaOnRows, class Tile, class Square, class Meet>
__device__ inline void make_matrices_of_chunk(const Tile& queries, const Tile& keys, const MatrixGates& gates,
                                              ChunkMatrices<Square>& matrices, float scale, int tokens,
                                              Meet meet) {
    using T2 = typename base_types::packing<T>::packed_type;
    const int thread = fresh_thread() % 128, warp = thread / 32, lane = thread % 32;
    TriangularMatrix& matrix = matrices.triangular();
    rt_fl<16, kChunk> of_keys, of_queries;
    rt<T, 16, kChunk> p;
    issue_scores<T, kDimK>(of_keys, keys, keys);  // 1
    issue_scores<T, kDimK>(of_queries, queries, keys);

    const int first_row = 16 * warp + lane / 4, first_column = 2 * (lane % 4);
    // x, which is in data[k] of the j-th 16 columns, times its decay and factor(row, column)
    auto gated = [&](float2 x, int j, int k, auto factor, bool strictly) {
        const int row = first_row + 8 * (k % 2), column = anew(first_column) + 16 * j + 8 * (k / 2);
        const float2 b = gates.log2_decay[row];
        const float4 before = *reinterpret_cast<const float4*>(&gates.log2_decay[column]);
        const float2 by = factor(row, column);
        const int last = row >= tokens ? -1 : row - strictly;  // the last column that the row sees
        return float2{column <= last ? by.x * exp2f((b.x - before.x) + (b.y - before.y)) * x.x : 0.f,
                      column < last ? by.y * exp2f((b.x - before.z) + (b.y - before.w)) * x.y : 0.f};
    };
    auto betas = [&](int row, int column) {
        if constexpr (kBetaOnRows)
            return float2{gates.beta[row], gates.beta[row]};
        else
            return *reinterpret_cast<const float2*>(&gates.beta[column]);
    };
    warpgroup::mma_async_wait<1>();
    pin(of_keys);

    each<0, kChunk / 4>([&](int i) {  // 2
        const int j = i / 4, k = i % 4;
        *reinterpret_cast<float2*>(
            &matrix.data[first_row + 8 * (k % 2)][first_column + 16 * j + 8 * (k / 2)]) =
            gated(of_keys.tiles[0][j].data[k], j, k, betas, true);
    });
    warpgroup::mma_async_wait<0>();
    pin(of_queries);
    each<0, kChunk / 4>([&](int i) {  // 3
        const int j = i / 4, k = i % 4;
        p.tiles[0][j].data[k] = from_float2<T2>(gated(
            of_queries.tiles[0][j].data[k], j, k,
            [&](int row, int column) {
                const float2 beta = kBetaOnRows ? float2{1.f, 1.f} : betas(row, column);
                return float2{scale * beta.x, scale * beta.y};
            },
            false));
    });
    invert_unit_lower(matrix, warp, lane, meet);  // 4

    const int row = thread / 2, first_unit = thread % 2 * 4;  // 5: two threads take a row of A
    T2 rounded[4][4];
    each<0, 16>([&](int i) {
        const int column = 8 * (first_unit + i / 4) + 2 * (i % 4);
        const float2 pair = *reinterpret_cast<const float2*>(&matrix.data[row][column]);
        const bool inside = row < tokens;
        rounded[i / 4][i % 4] = from_float2<T2>(
            {inside && column <= row ? pair.x : 0.f, inside && column + 1 <= row ? pair.y : 0.f});
    });
    meet();
    each<0, 4>([&](int i) {
        store_shared(shared_address(&matrices.a) + panel_offset(row, first_unit + i), rounded[i]);
    });
    store_panels<T, kChunk>(shared_address(&matrices.p), 16 * warp, p);
}

}  // namespace tfla_tk::delta_rule
