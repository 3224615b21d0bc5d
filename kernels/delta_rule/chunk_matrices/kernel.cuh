// The matrices A and P of every chunk and head of v, for walks of two walkers, whose CTAs have no registers
// left for makers (makers.cuh).
//
// A CTA of one warpgroup, of which a multiprocessor holds four, makes those of one chunk and head:
//   1. Load q and k; a warp scans the log decay and loads beta.
//   2. Make both (warpgroup.cuh).
//   3. Store both.
#pragma once

#include "common/tma.cuh"
#include "delta_rule/bindings/params.h"
#include "delta_rule/chunk_matrices/warpgroup.cuh"
#include "sequence/segments.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

struct MatricesGlobals {
    TensorMap q, k;  // boxes of a chunk
    TensorMap a, p;
    Gate g, beta;
    Cut cut;  // every chunk is one segment
    int heads, group, seq, slots;
    float scale;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

template <class T, int kDimK> struct MatricesMemory {
    using Tile = PanelTile<T, kChunk, kDimK>;
    using Square = PanelTile<T, kChunk, kChunk>;
    struct Inputs {
        Tile queries, keys;
    };
    union {
        Inputs in;
        TriangularMatrix triangular;  // once the GEMMs have read the inputs
    };
    ChunkMatrices<Square> matrices;
    MatrixGates gates;
    int row, head;  // of the results in their tensors
    semaphore arrived;
};

// The gates of the chunk, by one warp.
template <class Memory>
__device__ inline void load_chunk_gates(const MatricesGlobals& g, Memory& smem, const Segment& chunk,
                                        int batch, int head) {
    const float2 log_decay = load_log_decay(g.g, batch, head, chunk.first_row, 0, chunk.tokens);
    const float2 beta = GateRows(g.beta, batch, head, chunk.first_row).pair(0, chunk.tokens, 0.f);
    smem.gates.write(fresh_laneid(), cumulative_log2_decay(log_decay), beta);
}

template <class T, int kDimK, bool kBetaOnRows>
__global__ __launch_bounds__(128, 4) void delta_matrices_kernel(const __grid_constant__ MatricesGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    using Memory = MatricesMemory<T, kDimK>;
    auto& smem = *reinterpret_cast<Memory*>(shared_memory);
    const int head = blockIdx.x % g.heads, index = blockIdx.x / g.heads;

    const Segment chunk = find_segment(g.cut, g.seq, index);
    if (chunk.tokens <= 0) return;
    const int batch = g.packed() ? 0 : chunk.sequence;
    if (threadIdx.x == 0) {
        smem.row = (g.packed() ? index : chunk.number) * kChunk, smem.head = batch * g.heads + head;
        init_semaphore(smem.arrived, 1);
        publish_barriers();
        tma::expect_bytes(smem.arrived, 2 * Memory::Tile::loaded_bytes);
        load_panels(smem.in.keys, g.k, smem.arrived, 0, chunk.first_row, head / g.group, batch);
        load_panels(smem.in.queries, g.q, smem.arrived, 0, chunk.first_row, head / g.group, batch);
    }
    if (threadIdx.x < 32) load_chunk_gates(g, smem, chunk, batch, head);
    __syncthreads();
    wait(smem.arrived, 0);
    make_matrices_of_chunk<T, kDimK, kBetaOnRows>(
        smem.in.queries, smem.in.keys, smem.gates, smem.triangular, smem.matrices, g.scale, chunk.tokens,
        [] { __syncthreads(); }, [] {});
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        // NOTES: reread, to save registers
        const int row = load_anew(shared_address(&smem.row)), head = load_anew(shared_address(&smem.head));
        g.a.store_panel(shared_address(&smem.matrices.a), 0, row, head, 0);
        g.p.store_panel(shared_address(&smem.matrices.p), 0, row, head, 0);
        commit_stores();
        wait_stores_done();
    }
}

}  // namespace tfla_tk::delta_rule
