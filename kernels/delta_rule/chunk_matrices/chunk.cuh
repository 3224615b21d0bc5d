// The matrices A and, where it is wanted, P (bindings/params.h) of one chunk and head of v, by one warpgroup:
//   1. Load k, beta and, if P is wanted, q; scan the log decay.
//   2. K K^T and, if P is wanted, Q K^T, in flight together.
//   3. P = s e^{b_i - b_j} Q K^T, rounded; -L = -e^{b_i - b_j} K K^T to shared memory.
//   4. A = -(I + L diag(beta))^{-1} L (sequence/triangular_solve.cuh), rounded.
//   5. Store the results.
// In makers.cuh another warp takes steps 1 and 5. A maker in a walk (in_walk.cuh) shares the pieces that make
// A.
#pragma once

#include <type_traits>

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/gates.cuh"
#include "delta_rule/scores.cuh"
#include "sequence/segments.cuh"
#include "sequence/triangular_solve.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

struct MatricesGlobals {
    TensorMap q, k;  // boxes of a chunk
    TensorMap a, p;
    GateWords g, beta;
    Cut cut;  // every chunk is one segment
    int heads, group, seq, slots;
    float scale;
    ChunkBounds* bounds;  // null: not wanted

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
        alignas(256) UpperRows upper;  // of -L
        alignas(256) LowerRows lower;
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

// Makes the numbers of -L from the products k_i.k_j, in place, and stores them. gates: e^{b_i - b_j}. -L is
// zero past the last token; therefore A is, too.
template <class Block>
__device__ inline void write_erasures(uint32_t place, Block& block, int j, const ReadGates<16>& gates,
                                      int tokens) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int column = gates.column(0, k), last = gates.row(k) < tokens ? gates.row(k) : -1;
        const float2 gate = gates.of[0][k];
        float2& x = block.tiles[0][0].data[k];
        x = {column < last ? -gate.x * x.x : 0.f, column + 1 < last ? -gate.y * x.y : 0.f};
    }
    store_erasures(place, block, j);
}

// Steps 2 to 4, once the inputs and the gates are there. The results are in shared memory, visible to the TMA
// engine, once all warps have returned. beta: of 64 tokens.
//   meet        waits for the other warps of the warpgroup
//   multiplied  called when this warp has read the inputs, with its rows of K K^T
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
    multiplied(of_keys);
    meet();  // the results may replace the inputs
    const TriangularMatrix matrix(shared_address(&smem.out.upper), shared_address(&smem.out.lower));
    const uint32_t place = place_of_erasures(matrix, warp, fresh_laneid());
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++)
        if (j <= warp)  // no block right of the diagonal is made
            write_erasures(place, reinterpret_cast<rt_fl<16, 16>&>(of_keys.tiles[0][j]), j,
                           ReadGates<16>(smem.log2_decay, 1.f, 16 * j, warp), tokens);
    if constexpr (kWithScores)
#pragma unroll
        for (int j = 0; j < kChunk / 16; j++)
            ReadGates<16>(smem.log2_decay, scale, 16 * j, warp).apply(of_queries, j, tokens);
    gated();
    if constexpr (kWithScores) store_panels<T, kChunk>(shared_address(&smem.out.p), 16 * warp, of_queries);
    solve_unit_lower<T>(smem.out.a, matrix, beta, warp, meet);
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
