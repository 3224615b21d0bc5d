// Before the walks of the backward: scans the gates of every chunk (ChunkGates of walk/gates.cuh), once for
// all three walks and all CTAs of a head. One warp per chunk.
#pragma once

#include "common/kernel.cuh"
#include "kittens.cuh"
#include "scalar_gate/backward/row_terms.cuh"
#include "scalar_gate/backward/tile.cuh"
#include "scalar_gate/backward/walk/gates.cuh"
#include "scalar_gate/bindings/params_backward.h"

namespace tfla_tk::mlstm {

struct ScanGlobals : TileGlobals {
    Gate i, f;
    RowNorms norms;
    const float* chunk_m;
    ChunkGates* gates;
    int* tickets;
    float scale;
    FloatPair log2_scale;
};

template <class P>
__global__ __launch_bounds__(kTileThreads) void mlstm_bwd_scan_kernel(const __grid_constant__ ScanGlobals g) {
    TFLA_DEVICE_CODE {
        if (g.tickets != nullptr && blockIdx.x == 0 && threadIdx.x < 2) g.tickets[threadIdx.x] = 0;
        const Tile tile = Tile::of_block(g, blockIdx.x);
        const int chunk = threadIdx.x / 32;
        if (chunk >= tile.chunks) return;  // a tile without tokens has no chunks
        auto loader = [&](const Gate& gate) {
            return [&](float none) {
                return GateRows(gate, tile.batch, tile.head, tile.first_row).pair(chunk, tile.tokens, none);
            };
        };
        const float2 i = P::input(loader(g.i)), f = P::forget(loader(g.f));
        const int64_t slot = tile.batch_head * g.slots + tile.slot + tile.first_chunk + chunk;
        const FloatPair m_in = P::kStabilised ? load_chunk_m(g.chunk_m, slot) : FloatPair{};
        auto log2_w = [&](int t) {
            if (g.norms.row_n == nullptr || t >= tile.tokens) return 0.f;
            return RowNorm(g.norms, tile.batch_head * g.seq + tile.first_row + t).log2_w(g.norms.eps);
        };
        const int first = chunk * kChunk + 2 * fresh_laneid();
        scan_chunk<P>(g.gates[slot], i, f, m_in, {log2_w(first), log2_w(first + 1)}, g.scale, g.log2_scale);
    }
}

}  // namespace tfla_tk::mlstm
