// The matrices A and, where it is wanted, P (bindings/params.h) of one chunk and head of v, by one warpgroup:
//   1. Load k, beta and, if P is wanted, q; scan the log decay.
//   2. K K^T and, if P is wanted, Q K^T, in flight together.
//   3. P = s e^{b_i - b_j} Q K^T, rounded; -L = -e^{b_i - b_j} K K^T to shared memory.
//   4. A = -(I + L diag(beta))^{-1} L (triangular_solve.cuh), rounded.
//   5. Store the results.
// In makers.cuh another warp takes steps 1 and 5.
#pragma once

#include <type_traits>

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/chunk_matrices/triangular_solve.cuh"
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

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// A chunk of a head of v.
struct ChunkOfHead {
    int batch, head;
    int first_row, tokens;  // tokens <= 0: nothing to do
    int slot;               // of the matrices
    int step;               // in its sequence
};

template <class T, int kDimK, bool kWithP> struct MatricesTiles {
    static constexpr bool kWithScores = kWithP;
    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    struct Inputs {
        Tile keys;
        [[no_unique_address]] std::conditional_t<kWithScores, Tile, Nothing> queries;
    };
    struct Results {
        Square a;
        [[no_unique_address]] std::conditional_t<kWithScores, Square, Nothing> p;
        TriangularMatrix matrix;
    };
};

// Starts the loads of k and, for P, of q, by one thread, which has expected their bytes.
template <class Memory>
__device__ inline void load_inputs(const MatricesGlobals& g, Memory& smem, const ChunkOfHead& chunk) {
    const int key_head = chunk.head / g.group;
    load_panels(smem.in.keys, g.k, smem.arrived, 0, chunk.first_row, key_head, chunk.batch);
    if constexpr (Memory::Tiles::kWithScores)
        load_panels(smem.in.queries, g.q, smem.arrived, 0, chunk.first_row, key_head, chunk.batch);
}

// Step 3: makes -L from K K^T, in shared memory. It is zero past the last token; therefore A is, too. No
// block of 16 right of the diagonal is made.
__device__ inline void gate_erasures(TriangularMatrix& matrix, const rt_fl<16, kChunk>& of_keys,
                                     const Log2Decay& b, int tokens, int warp) {
    const int lane_row = fresh_laneid() / 4, first_column = 2 * (fresh_laneid() % 4);
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (j > warp) continue;
            const int eight = 16 * warp + 8 * (k % 2), row = eight + lane_row;
            const int column = first_column + 16 * j + 8 * (k / 2);
            const float2 gate = decays_between(b, row, column), x = of_keys.tiles[0][j].data[k];
            const bool is_token = row < tokens;
            matrix.pair_at(eight, lane_row, column) = {is_token && column < row ? -gate.x * x.x : 0.f,
                                                       is_token && column + 1 < row ? -gate.y * x.y : 0.f};
        }
}

// Steps 2 to 4, once the inputs and the gates are there. The results are in shared memory, visible to the TMA
// engine, once all warps have returned. beta: of 64 tokens.
//   meet        waits for the other warps of the warpgroup
//   multiplied  called when this warp has read the inputs
//   gated       called when this warp has read the log decay, before it writes P and A
template <class T, int kDimK, class Memory, class Meet, class Multiplied, class Gated>
__device__ inline void make_matrices(Memory& smem, const float* beta, int tokens, float scale, int warp,
                                     Meet meet, Multiplied multiplied, Gated gated) {
    constexpr bool kWithScores = Memory::Tiles::kWithScores;
    rt_fl<16, kChunk> of_keys, of_queries;
    issue_scores<T, kDimK>(of_keys, smem.in.keys, smem.in.keys);
    if constexpr (kWithScores) issue_scores<T, kDimK>(of_queries, smem.in.queries, smem.in.keys);
    warpgroup::mma_async_wait<0>();
    pin(of_keys);
    if constexpr (kWithScores) pin(of_queries);
    multiplied();
    meet();  // the results may replace the inputs
    gate_erasures(smem.out.matrix, of_keys, smem.log2_decay, tokens, warp);
    if constexpr (kWithScores)
#pragma unroll
        for (int j = 0; j < kChunk / 16; j++)
            ReadGates<16>(smem.log2_decay, scale, 16 * j, warp).apply(of_queries, j, tokens);
    gated();
    if constexpr (kWithScores) store_panels<T, kChunk>(shared_address(&smem.out.p), 16 * warp, of_queries);
    solve_unit_lower<T>(smem.out.a, smem.out.matrix, beta, warp, meet);
    fence_async_proxy();
}

// Starts the stores of the results, by one thread. slot, head: of the results in their tensors.
template <class Memory>
__device__ inline void store_matrices(const MatricesGlobals& g, Memory& smem, int slot, int head) {
    g.a.store_panel(shared_address(&smem.out.a), 0, slot * kChunk, head, 0);
    if constexpr (Memory::Tiles::kWithScores)
        g.p.store_panel(shared_address(&smem.out.p), 0, slot * kChunk, head, 0);
    commit_stores();
}

}  // namespace tfla_tk::delta_rule
