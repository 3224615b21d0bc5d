// The matrices A and P (bindings/params.h) of one chunk and head of v, by one warpgroup:
//   1. Load q and k; two warps scan the log decay and load beta.
//   2. K K^T and Q K^T, in flight together.
//   3. P = s e^{b_i - b_j} Q K^T, rounded; L = e^{b_i - b_j} K K^T, times beta, to shared memory.
//   4. A = (I + L)^{-1} (triangular_inverse.cuh), rounded.
//   5. Store both tiles.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "common/warp.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/chunk_matrices/triangular_inverse.cuh"
#include "delta_rule/gates.cuh"
#include "delta_rule/scores.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

struct MatricesGlobals {
    TensorMap q, k;  // boxes of a chunk
    TensorMap a, p;
    GateWords g, beta;
    Cut cut;  // every chunk is one segment
    int heads, group, seq, slots;
    float scale;
    bool beta_on_rows;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// A chunk of a head of v.
struct ChunkOfHead {
    int batch, head;
    int first_row, tokens;  // tokens <= 0: nothing to do
    int slot;               // of the matrices
};

template <class T, int kDimK> struct MatricesTiles {
    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    struct Inputs {
        Tile queries, keys;
    };
    struct Results {
        Square a, p;
        TriangularMatrix matrix;
    };
};

// Per token.
struct MatricesFactors {
    alignas(16) float2 log2_decay[kChunk];            // b, as high and low part
    float row_factor[kChunk], column_factor[kChunk];  // of L: beta or 1
    float score_factor[kChunk];                       // of columns of P: the rest of beta, or 1

    __device__ inline void write_beta(const MatricesGlobals& g, float2 beta) {
        const int place = 2 * fresh_laneid();
        const float2 ones{1.f, 1.f};
        write_pair(row_factor, place, g.beta_on_rows ? beta : ones);
        write_pair(column_factor, place, g.beta_on_rows ? ones : beta);
        write_pair(score_factor, place, g.beta_on_rows ? ones : rest_part(beta));
    }
};

// Starts the loads of q and k, by one thread. Their bytes are expected.
template <class Memory>
__device__ inline void load_inputs(const MatricesGlobals& g, Memory& smem, const ChunkOfHead& chunk) {
    const int key_head = chunk.head / g.group;
    load_panels(smem.in.keys, g.k, smem.arrived, 0, chunk.first_row, key_head, chunk.batch);
    load_panels(smem.in.queries, g.q, smem.arrived, 0, chunk.first_row, key_head, chunk.batch);
}

// Rounds the inverse to a tile: two threads take a row. Zero right of the diagonal and past the last token.
template <class T, class Square>
__device__ inline void round_inverse(Square& tile, const TriangularMatrix& m, int tokens) {
    using T2 = typename base_types::packing<T>::packed_type;
    const int thread = fresh_thread() % 128, row = thread / 2, first_unit = thread % 2 * 4;
#pragma unroll
    for (int unit = first_unit; unit < first_unit + 4; unit++) {
        T2 x[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int column = 8 * unit + 2 * n;
            const float2 pair = *reinterpret_cast<const float2*>(&m.data[row][column]);
            const bool inside = row < tokens;
            x[n] = from_float2<T2>(
                {inside && column <= row ? pair.x : 0.f, inside && column + 1 <= row ? pair.y : 0.f});
        }
        store_shared(shared_address(&tile) + panel_offset(row, unit), x);
    }
}

// Step 3: of K K^T and Q K^T L, in shared memory, and P in place.
template <class Memory>
__device__ inline void gate_scores(Memory& smem, rt_fl<16, kChunk>& of_keys, rt_fl<16, kChunk>& of_queries,
                                   int tokens, float scale, int warp) {
    const int first_row = 16 * warp + fresh_laneid() / 4, first_column = 2 * (fresh_laneid() % 4);
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = first_row + 8 * (k % 2), column = first_column + 16 * j + 8 * (k / 2);
            float2 &keys = of_keys.tiles[0][j].data[k], &queries = of_queries.tiles[0][j].data[k];
            const float2 b = smem.log2_decay[row];
            const float4 before = *reinterpret_cast<const float4*>(&smem.log2_decay[column]);
            const float row_factor = smem.row_factor[row];
            const float2 factor = *reinterpret_cast<const float2*>(&smem.column_factor[column]);
            const float2 of_scores = *reinterpret_cast<const float2*>(&smem.score_factor[column]);
            auto gated = [&](float& of_keys, float& of_queries, float2 before, float factor, float of_scores,
                             int column) {
                const float gate = exp2f((b.x - before.x) + (b.y - before.y));
                const bool seen = column <= row && row < tokens, strictly = column < row;
                of_keys = seen && strictly ? row_factor * factor * gate * of_keys : 0.f;
                of_queries = seen ? scale * of_scores * gate * of_queries : 0.f;
            };
            gated(keys.x, queries.x, {before.x, before.y}, factor.x, of_scores.x, column);
            gated(keys.y, queries.y, {before.z, before.w}, factor.y, of_scores.y, column + 1);
            *reinterpret_cast<float2*>(&smem.out.matrix.data[row][column]) = keys;
        }
}

// Steps 2 to 4, once the inputs and the factors are there. The results are in shared memory, visible to the
// TMA engine, once all warps are through.
//   meet        waits for the other warps of the warpgroup
//   multiplied  called when this warp has read the inputs
//   gated       called when this warp has read the factors, before it writes P and A
template <class T, int kDimK, class Memory, class Meet, class Multiplied, class Gated>
__device__ inline void make_matrices(Memory& smem, int tokens, float scale, int warp, Meet meet,
                                     Multiplied multiplied, Gated gated) {
    rt_fl<16, kChunk> of_keys, of_queries;
    issue_scores<T, kDimK>(of_keys, smem.in.keys, smem.in.keys);
    issue_scores<T, kDimK>(of_queries, smem.in.queries, smem.in.keys);
    warpgroup::mma_async_wait<0>();
    pin(of_keys), pin(of_queries);
    multiplied();
    meet();  // the results may replace the inputs
    gate_scores(smem, of_keys, of_queries, tokens, scale, warp);
    gated();
    store_panels<T, kChunk>(shared_address(&smem.out.p), 16 * warp, of_queries);
    invert_unit_lower(smem.out.matrix, warp, fresh_laneid(), meet);
    round_inverse<T>(smem.out.a, smem.out.matrix, tokens);
    fence_async_proxy();
}

// Starts the stores of both tiles, by one thread. slot, head: of the results in their tensors.
template <class Memory>
__device__ inline void store_matrices(const MatricesGlobals& g, Memory& smem, int slot, int head) {
    g.a.store_panel(shared_address(&smem.out.a), 0, slot * kChunk, head, 0);
    g.p.store_panel(shared_address(&smem.out.p), 0, slot * kChunk, head, 0);
    commit_stores();
}

}  // namespace tfla_tk::delta_rule
