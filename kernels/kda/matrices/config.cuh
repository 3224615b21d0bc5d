// Arguments and shared memory of the kernel of the chunk matrices.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "kda/tiles.cuh"
#include "sequence/gate_loads.cuh"
#include "sequence/segments.cuh"
#include "sequence/triangular_solve.cuh"

namespace tfla_tk::kda {

using namespace kittens;

constexpr int kBlock = 16, kBlocks = kChunk / kBlock;              // tokens of a warp
constexpr int kPart = kPanelColumns;                               // channels at a time
constexpr int kMatricesThreads = 32 * kBlocks, kMatricesCtas = 4;  // CTAs of a multiprocessor

constexpr float kLog2e = 1.44269504f;
// How far b may be from the middle of a block where both factors around it are made.
constexpr float kMildBits = 80.f;
// Smaller gates are taken for this: nothing passes them in fp32. So |b| <= 16 kClosedBits in a block, whose
// rounding is 2^-14 bits.
constexpr float kClosedBits = 160.f;

struct MatricesGlobals {
    TensorMap q, k;  // boxes of a chunk
    TensorMap g;     // boxes of a block, without swizzle
    TensorMap a, p;
    KdaMatricesParams params;
    GateWords beta;
    Cut cut;  // every chunk is one segment
    int slots;

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
    __device__ inline bool has_float_gates() const { return params.g_type == DType::float32; }
};

// A chunk of a head of v; slot: of what is left.
struct Chunk {
    int batch, head, first_row, tokens, slot;
};

// 64 channels of a chunk.
template <class T> struct MatricesInputs {
    PanelTile<T, kChunk, kPart> keys, queries;
    // Gates of a block of 16 tokens from its first row on, of 16 bits in half of its memory. Then b from the
    // block's begin, in bits, with units of 16 bytes XORed with 2 (token % 4).
    alignas(1024) float gates[kChunk][kPart];
};
template <class T> struct MatricesResults {
    PanelTile<T, kChunk, kChunk> a, p;
    alignas(256) UpperRows upper;  // of -L
    alignas(256) LowerRows lower;
};

template <class T, int kDimK> struct MatricesMemory {
    // The results replace the inputs once all scores are made.
    union {
        MatricesInputs<T> in;
        MatricesResults<T> out;
    };
    float4 writers[kBlocks - 1][kPart / 8][32];  // k e^{b_16 - b}: of eight channels, as a lane has them
    float total[kBlocks][kPart], middle[kBlocks][kPart];  // b of the block's last and of its eighth token
    alignas(16) float beta[kChunk];
    float query_rstd[kChunk], key_rstd[kChunk];  // as in Factors
    float bias[kDimK];                           // dt_bias, times the slope of GateScale
    float rate;                                  // e^{A_log}
    semaphore arrived;
};

}  // namespace tfla_tk::kda
