// The gradients of the gates from what the walk for dq, dk and dv leaves:
//
//     di_t = k_t.dk_t      dlf_t = sum over j < t <= i of x_ij      df_t = sigmoid(-f_t) dlf_t
//
// where x_ij is what token i receives from token j: q_i.dq_i is the sum of x_ij over j, k_j.dk_j that over i.
// In a chunk before which the walk has had S, with dS behind the chunk and c_j = k_j.dk_j as far as it goes
// through dS,
//
//     dlf_t = decay <S, dS> + sum of c over the chunk + sum_{u >= t} (q_u.dq_u - k_u.dk_u)
//
// The first two are the flow over the chunk's end. NOTES: what goes through dS from tokens behind t cancels,
// and so does what flows between them, since all sums are of the same rounded operands. All that is left may
// be far smaller. In the other chunks the flow comes from the end of the chunk before,
//
//     dlf_t = flow - sum_{u < t} (q_u.dq_u - k_u.dk_u)
//
// which cancels no better than states are rounded, and so is not for a chunk that forgets all before it:
// there decay <S, dS> is nothing, and the first equation serves.
#pragma once

#include "scalar_gate/backward/gate_gradients.cuh"
#include "scalar_gate/bindings/params_backward.h"

namespace tfla_tk::mlstm {

struct GateSumsGlobals : TileGlobals {
    const float *q_dq, *k_dk, *flows;
    int parts;  // of a flow that have been written
    Gate i, f;
    Gate di, df;
    const float* chunk_m;
};

// One CTA per kTileWarps chunks, one warp per chunk.
template <class P>
__global__ __launch_bounds__(kTileThreads) void mlstm_gate_gradients_kernel(
    const __grid_constant__ GateSumsGlobals g) {
    TFLA_DEVICE_CODE {
        static_assert(kTileWarps % kStateChunks == 0 && kStateChunks == 2);
        const Tile tile = Tile::of_block(g, blockIdx.x);
        const int chunk = threadIdx.x / 32;
        if (chunk >= tile.chunks) return;  // a tile without tokens has no chunks
        const LaneTokens lane(chunk, tile.tokens);
        const TokenGates<P> gates(g, tile, lane);
        const int64_t row = tile.batch_head * g.seq + tile.first_row;
        const float2 q = lane.load(g.q_dq + row, 0.f), k = lane.load(g.k_dk + row, 0.f);
        const int64_t slot = tile.batch_head * g.slots + tile.slot + tile.first_chunk + chunk;
        float m_in = 0.f;
        if constexpr (P::kStabilised) m_in = load_chunk_m(g.chunk_m, slot).high;
        const bool from_before = chunk % kStateChunks != 0 && !forgets_all_before<P>(gates.i, gates.f, m_in);
        float flow = 0.f;
        if (const int part = fresh_laneid(); part < g.parts)
            flow = g.flows[(slot - from_before) * kFlowParts + part];
        const float2 given{q.x - k.x, q.y - k.y};
        flow = warp_sum(flow - (from_before ? given.x + given.y : 0.f));
        const float2 sums = suffix_sums(given);
        store_gradients(g, tile, lane, gates, k, flow, sums);
    }
}

}  // namespace tfla_tk::mlstm
