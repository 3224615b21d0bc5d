// Arguments and shared memory of the parallel half of the backward.
#pragma once

#include "common/register_steps.cuh"
#include "kda/matrices/gates.cuh"
#include "kda/state_fragments.cuh"

namespace tfla_tk::kda {

constexpr int kGroups = 2;  // warpgroups; a warpgroup has 64 columns of V, later 64 channels of K
constexpr int kGradientsThreads = 128 * kGroups;
constexpr int kTiles8 = kPart / 8;  // tiles of eight channels

struct GradientsGlobals {
    TensorMap q, k;  // boxes of a chunk
    TensorMap g;     // boxes of a block, without swizzle
    TensorMap v, d_out, solved;
    TensorMap tiles;  // boxes of 64 tokens, as the forward's walk reads them
    TensorMap a;
    KdaGradientsParams params;
    Cut cut;  // every chunk is one segment
    int slots;
    int groups;  // of 64 columns of V

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// What a walk has of a chunk. V becomes Y, R' becomes G.
template <class T, int kDimK> struct ChunkOfWalk {
    using Columns = PanelTile<T, kChunk, kWalkerColumns>;
    using State = PanelTile<T, kGroups * kWalkerColumns, kDimK>;  // S^T, dS'^T
    PanelTile<T, kChunk, kDimK> reads;                            // K_F
    PanelTile<T, kChunk, kChunk> a;
    Columns values[kGroups], d_out[kGroups], solved[kGroups];
    State state, state_gradient;  // they arrive as StateFragments
};

// dP or dL, in fp32 rounded to tf32. NOTES: four more columns, so that operands of mma.sync are read without
// bank conflicts.
using ScoreGradients = float[kChunk][kChunk + 4];

// Operands B of mma.sync, m16n8k8 in tf32, of a block of 16 tokens and 64 channels: a lane's two numbers of
// eight tokens and eight channels, tokens lane % 4 and + 4, channel lane / 4. A lane's results of eight
// channels replace them.
union BlockOperands {
    float2 of[2][kTiles8][32];
    float4 results[kTiles8][32];
};

// k e^{b_16 - b}, s q e^b and k e^b. Their results: of readers of q, of k, and of writers.
enum OperandOfBlock : int { kKeysToEnd, kQueriesFromBegin, kKeysFromBegin, kOperands };

template <class T, int kDimK> struct GradientsMemory {
    static constexpr int kParts = kDimK / kPart;
    PanelTile<T, kChunk, kDimK> queries, keys;
    alignas(1024) float gates[kParts][kChunk][kPart];  // as those of MatricesInputs, at last dg
    // What is made of the walk's tiles replaces them.
    union {
        ChunkOfWalk<T, kDimK> walk;
        struct {
            BlockOperands operands[kParts][kBlocks][kOperands];
            ScoreGradients d_scores, d_erasures;  // dP without its diagonal, dL
            float own[kChunk];                    // that diagonal
        } within;
    };
    float total[kParts][kBlocks][kPart], middle[kParts][kBlocks][kPart];
    Factors<kDimK> factors;
    alignas(16) float bias[kDimK];
    alignas(16) float flow[kGroups * 4][kDimK];  // <S, dS'> over a warp's columns of V
    float strength[kGroups * 4][kChunk];         // sum of U' R' over these
    float block_sums[kBlocks][kDimK];            // of a block: what dg of all earlier tokens gets
    float block_flow[kBlocks][kDimK];            // sum of k dK_G e^{b_L - b}
    float later[kBlocks][kDimK];                 // what dg gets besides the sums within a block
    float row_dots[2][kParts][kChunk];           // q dq and k dk
    float bias_sums[kBlocks][kDimK];
    float rate_sums[kParts][kBlocks];
    float rate;  // e^{A_log}
    semaphore inputs_arrived, walk_arrived;

    // Of a lane and eight channels: dq (of s q), dk, and sums of what dg is made of over later tokens of the
    // block.
    __device__ inline float4& result(int part, int block, int kind, int tile, int lane) {
        return within.operands[part][block][kind].results[tile][lane];
    }
};

// b of a token and channel of a part, once the gates are summed up.
template <class Gates> __device__ inline auto& b_at(Gates& gates, int token, int channel) {
    return gates[token][channel ^ (8 * (token % 4))];
}

}  // namespace tfla_tk::kda
