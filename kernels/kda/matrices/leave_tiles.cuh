// The tiles and the factors that the walk reads: 64 channels of a warp's 16 tokens, straight to memory.
//
// A lane has four channels of eight tokens, so a store of a warp is two whole lines. Factors are products of
// numbers up to 1, forward in time for Q_F and K_F, backward for K_G: e^{b_t - b_{t-1}} of these tokens, the
// decay over all tokens before them and that over all behind. So they are exact for any gates.
#pragma once

#include "kda/matrices/gates.cuh"

namespace tfla_tk::kda {

// x times by, rounded, to four neighbours of a tile.
template <class T> __device__ inline void store_row(T* to, const float (&x)[4], const float (&by)[4]) {
    using T2 = typename base_types::packing<T>::packed_type;
    const T2 pairs[2] = {from_float2<T2>({x[0] * by[0], x[1] * by[1]}),
                         from_float2<T2>({x[2] * by[2], x[3] * by[3]})};
    const auto* bits = reinterpret_cast<const uint32_t*>(pairs);
    *reinterpret_cast<uint2*>(to) = {bits[0], bits[1]};
}

template <class T, int kDimK> struct TileWriter {
    static constexpr int kChannels = LaneGates::kChannels;
    static constexpr int kTokens = 4;  // at a time, to save registers
    using Four = float[kChannels];

    const MatricesMemory<T, kDimK>& smem;
    T* tiles;  // of the chunk: [kTiles, kChunk, kDimK]
    float scale;
    int part, block;
    int half, channel;  // of the lane: as LaneGates has them
    // In bits from the block's begin: b of the token before, b of the block's end; and of the blocks behind.
    float last[kChannels], own[kChannels], later[kChannels];
    float before[kChannels];  // the decay over all tokens before

    __device__ inline TileWriter(const MatricesMemory<T, kDimK>& smem, const KdaMatricesParams& p,
                                 int64_t chunk, int part, int block)
        : smem(smem),
          tiles(static_cast<T*>(p.left.tiles) + chunk * (kTiles * kChunk * kDimK)),
          scale(p.scale),
          part(part),
          block(block) {
        const LaneGates lane(fresh_laneid());
        half = lane.half, channel = lane.channel;
        load_four(own, shared_address(&smem.total[block][channel]));
        load_four(last, shared_address(&smem.middle[block][channel]));
#pragma unroll
        for (int c = 0; c < kChannels; c++) before[c] = last[c] = half ? last[c] : 0.f, later[c] = 0.f;
#pragma unroll
        for (int n = 0; n < kBlocks; n++) {
            Four x;
            load_four(x, shared_address(&smem.total[n][channel]));
#pragma unroll
            for (int c = 0; c < kChannels; c++) {
                if (n < block) before[c] += x[c];
                if (n > block) later[c] += x[c];
            }
        }
#pragma unroll
        for (int c = 0; c < kChannels; c++) before[c] = exp2f(before[c]);
    }

    // By the warp of the first block.
    __device__ inline void leave_decay(Factors<kDimK>& to) const {
        if (half == 0)
            *reinterpret_cast<float4*>(&to.decay[part * kPart + channel]) = {
                exp2f(own[0] + later[0]), exp2f(own[1] + later[1]), exp2f(own[2] + later[2]),
                exp2f(own[3] + later[3])};
    }

    __device__ inline void leave_rows() {
        const int first = block * kBlock + half * LaneGates::kTokens;
#pragma unroll 1
        for (int row = first; row < first + LaneGates::kTokens; row += kTokens) leave_four_rows(row);
    }

  private:
    // Tokens `row` to row + 3. NOTES: row is a multiple of 4, so that the swizzles are constants.
    __device__ inline void leave_four_rows(int row) {
        float decays[kTokens][kChannels], keys[kTokens][kChannels];
        load_decays(decays, row);
        const uint32_t offset = panel_offset(row, channel / 8) + channel % 8 * sizeof(T);
        auto load = [&](Four& x, const auto& tile, int i) {
            load_short_four<T>(x, shared_address(&tile) + (offset ^ 16 * i) + i * kPanelColumns * sizeof(T));
        };
        T* const to = tiles + row * kDimK + part * kPart + channel;
        auto store = [&](TileOfChunk tile, int i, const Four& x, const Four& by) {
            store_row(to + (tile * kChunk + i) * kDimK, x, by);
        };
#pragma unroll
        for (int i = 0; i < kTokens; i++) {
            Four q, of_query;
            load(q, smem.in.queries, i), load(keys[i], smem.in.keys, i);
            const float query_factor = scale * smem.query_rstd[row + i], key_factor = smem.key_rstd[row + i];
#pragma unroll
            for (int c = 0; c < kChannels; c++) {
                before[c] *= decays[i][c], of_query[c] = query_factor * before[c];
                keys[i][c] *= key_factor;
            }
            store(kQueries, i, q, of_query), store(kReads, i, keys[i], before);
        }
        Four behind;
#pragma unroll
        for (int c = 0; c < kChannels; c++) behind[c] = exp2f(later[c] + (own[c] - last[c]));
#pragma unroll
        for (int i = kTokens - 1; i >= 0; i--) {
            store(kWriters, i, keys[i], behind);
#pragma unroll
            for (int c = 0; c < kChannels; c++) behind[c] *= decays[i][c];
        }
    }
    // Of each token; `last` becomes b of the last one.
    __device__ inline void load_decays(float (&decays)[kTokens][kChannels], int row) {
        const uint32_t gates = shared_address(&smem.in.gates[row][0]);
#pragma unroll
        for (int i = 0; i < kTokens; i++) {
            Four b;
            load_four(b, gates + i * kPart * 4 + 16 * ((channel / 4) ^ (2 * i)));
#pragma unroll
            for (int c = 0; c < kChannels; c++) decays[i][c] = exp2f(b[c] - last[c]), last[c] = b[c];
        }
    }
};

}  // namespace tfla_tk::kda
