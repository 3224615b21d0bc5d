// What comes before the scores: norms of q and k, beta, and the log decays summed up in blocks of 16 tokens.
#pragma once

#include "kda/matrices/config.cuh"

namespace tfla_tk::kda {

__device__ inline void load_four(float (&x)[4], uint32_t address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address));
}
// The nearest number of tf32, in which mma.sync reads operands.
__device__ inline float rounded_to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}
// Four numbers of 16 bits.
template <class T> __device__ inline void load_short_four(float (&x)[4], uint32_t address) {
    typename base_types::packing<T>::packed_type pairs[2];
    auto* bits = reinterpret_cast<uint32_t*>(pairs);
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "r"(address));
    const float2 low = to_float2(pairs[0]), high = to_float2(pairs[1]);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// A warp's 16 rows of q or k, for their norms. The squares of these are the diagonal of the products of all
// rows: a lane has eight channels of rows r = lane / 4 and r + 8, and hands them to mma.sync as its part of
// both operands, since channels may be counted in any order. NOTES: the rows are on their way to shared
// memory meanwhile, but there the channels come one part after the other.
template <class T, int kDimK> struct RowsForNorms {
    using T2 = typename base_types::packing<T>::packed_type;
    static constexpr int kSteps = kDimK / 32;

    uint4 units[kSteps][2];

    __device__ inline void load(const KdaMatricesParams& p, const Operand& x, const Chunk& chunk, int block) {
        const int lane = fresh_laneid(), first = block * kBlock + lane / 4;
        const T* const rows = static_cast<const T*>(x.data) + chunk.batch * x.batch_stride +
                              chunk.head / p.shape.group * x.head_stride +
                              (chunk.first_row + first) * x.row_stride;
#pragma unroll
        for (int n = 0; n < kSteps; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = 32 * n + lane % 4 * 8;
                const bool is_own = first + 8 * half < chunk.tokens && column < p.shape.dim_k;
                units[n][half] =
                    is_own ? *reinterpret_cast<const uint4*>(rows + 8 * half * x.row_stride + column)
                           : uint4{};
            }
    }
    // The factors of l2norm.
    __device__ inline void write_rstd(float (&to)[kChunk], int block) const {
        float2 upper[2]{}, lower[2]{};  // products with rows 0 to 7 and with rows 8 to 15
#pragma unroll
        for (int n = 0; n < kSteps; n++) {
            const T2 *a = reinterpret_cast<const T2*>(&units[n][0]),
                     *b = reinterpret_cast<const T2*>(&units[n][1]);
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                warp::hmma16816(upper[0], upper[1], a[k], b[k], a[k + 1], b[k + 1], a[k], a[k + 1], upper[0],
                                upper[1]);
                warp::hmma16816(lower[0], lower[1], a[k], b[k], a[k + 1], b[k + 1], b[k], b[k + 1], lower[0],
                                lower[1]);
            }
        }
        const int lane = fresh_laneid(), r = lane / 4, first = block * kBlock + r;
        if (lane % 4 != r / 2) return;  // has none of the diagonal
        to[first] = rsqrtf((r % 2 ? upper[0].y : upper[0].x) + 1e-6f);
        to[first + 8] = rsqrtf((r % 2 ? lower[1].y : lower[1].x) + 1e-6f);
    }
};

// Norms of a warp's rows (Factors).
template <class T, int kDimK, class Memory>
__device__ inline void write_row_rstd(Memory& smem, const KdaMatricesParams& p, const Chunk& chunk,
                                      int block) {
    if (p.l2norm) {
        RowsForNorms<T, kDimK> queries, keys;
        queries.load(p, p.q, chunk, block), keys.load(p, p.k, chunk, block);
        queries.write_rstd(smem.query_rstd, block), keys.write_rstd(smem.key_rstd, block);
    } else if (const int token = fresh_laneid(); token < kBlock) {
        smem.query_rstd[block * kBlock + token] = smem.key_rstd[block * kBlock + token] = 1.f;
    }
}

// By a warp; a lane has two tokens.
__device__ inline void write_betas(float (&to)[kChunk], const MatricesGlobals& g, const Chunk& chunk) {
    const KdaMatricesParams& p = g.params;
    GateStream betas(g.beta, chunk.batch, chunk.head, chunk.first_row, chunk.tokens);
    const float2 given = betas.take(0, chunk.tokens, 0.f);
    const int token = 2 * fresh_laneid();
    auto strength = [&](float x, int token) {
        const float once = p.beta_sigmoid ? 1.f / (1.f + exp2f(-kLog2e * x)) : x;
        return token < chunk.tokens ? p.beta_double ? 2.f * once : once : 0.f;
    };
    write_pair(to, token, {strength(given.x, token), strength(given.y, token + 1)});
}

// How an amount of decay follows from a raw gate: as of y = slope g + bias; and its unit in bits.
struct GateScale {
    float slope, unit;

    __device__ inline GateScale(const KdaMatricesParams& p, float rate)
        : slope(p.gate == LogDecay::sigmoid ? -kLog2e * rate : kLog2e),
          unit(p.gate == LogDecay::log        ? kLog2e
               : p.gate == LogDecay::softplus ? rate
                                              : -kLog2e * p.lower_bound) {}
};

// What raw gates of a head take, by one warp.
template <class Memory>
__device__ inline void write_gate_parameters(Memory& smem, const KdaMatricesParams& p, int head) {
    constexpr int kDimK = sizeof(smem.bias) / sizeof(float);
    const int lane = fresh_laneid();
    const float rate = p.a_log.data ? expf(load_gate(p.a_log, head * p.a_log.head_stride)) : 1.f;
    const float slope = GateScale(p, rate).slope;
    if (lane == 0) smem.rate = rate;
    const int64_t first = head * p.dt_bias.head_stride;
#pragma unroll
    for (int c = lane; c < kDimK; c += 32)
        smem.bias[c] = p.dt_bias.data && c < p.shape.dim_k
                           ? slope * load_gate(p.dt_bias, first + c * p.dt_bias.row_stride)
                           : 0.f;
}

// log2(1 + 2^y) to 1e-5 of it. NOTES: by a polynomial that is log2(1 + e) / e for e from 0 to 1: a logarithm
// would lose the last bits of a small e, and wait for the unit that makes the exponentials.
__device__ inline float softplus_in_bits(float y) {
    constexpr float kPolynomial[] = {1.44268292f,   -0.720426154f, 0.469173999f,
                                     -0.303036038f, 0.146032712f,  -0.0344358393f};
    const float e = exp2f(-fabsf(y));
    float x = kPolynomial[5];
#pragma unroll
    for (int n = 4; n >= 0; n--) x = x * e + kPolynomial[n];
    return x * e + fmaxf(y, 0.f);
}

__device__ inline float min_or_nan(float x, float y) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}

// What a lane has of a block's gates: four channels of its first or of its last eight tokens.
struct LaneGates {
    static constexpr int kTokens = 8, kChannels = 4;
    int half, channel, first;  // first: of the tokens
    float of[kTokens][kChannels];

    __device__ inline explicit LaneGates(int lane)
        : half(lane / 16), channel(lane % 16 * kChannels), first(half * kTokens) {}

    // Gates as they came to the memory of a block.
    __device__ inline void load(const float (&block)[kPart], DType dtype) {
        const uint32_t start = shared_address(block);
        auto load_all = [&](int bytes, auto load_token) {
#pragma unroll
            for (int t = 0; t < kTokens; t++)
                load_token(of[t], start + ((first + t) * kPart + channel) * bytes);
        };
        if (dtype == DType::float32)
            load_all(4, [](float (&x)[kChannels], uint32_t from) { load_four(x, from); });
        else if (dtype == DType::bfloat16)
            load_all(2, [](float (&x)[kChannels], uint32_t from) { load_short_four<bf16>(x, from); });
        else
            load_all(2,
                     [](float (&x)[kChannels], uint32_t from) { load_short_four<kittens::half>(x, from); });
    }

    // Amounts of decay of them; none past the block's `tokens`. bias: of the part's channels.
    __device__ inline void to_amounts(LogDecay gate, float slope, const float* bias, int tokens) {
        float more[kChannels];
        load_four(more, shared_address(&bias[channel]));
        if (gate == LogDecay::log)
            change([](int, float g, int) { return -g; });
        else if (gate == LogDecay::softplus)
            change([&](int, float g, int c) { return softplus_in_bits(slope * g + more[c]); });
        else
            change([&](int, float g, int c) { return __fdividef(1.f, 1.f + exp2f(slope * g + more[c])); });
        if (tokens < kBlock) change([&](int t, float x, int) { return first + t < tokens ? x : 0.f; });
    }

    // Sums of the log decays in bits over the lane's tokens. Returns whether all channels are mild.
    __device__ inline bool sum(float unit) {
        const float most = __fdividef(kClosedBits, fabsf(unit));
        bool mild = true;
#pragma unroll
        for (int c = 0; c < kChannels; c++) {
            float sum = 0.f;
#pragma unroll
            for (int t = 0; t < kTokens; t++) of[t][c] = sum = sum - unit * min_or_nan(of[t][c], most);
            mild = mild && fabsf(sum) <= kMildBits;
        }
        return mild;
    }

  private:
    template <class Make> __device__ inline void change(Make make) {
#pragma unroll
        for (int t = 0; t < kTokens; t++)
#pragma unroll
            for (int c = 0; c < kChannels; c++) of[t][c] = make(t, of[t][c], c);
    }
};

// Gates of a chunk and 64 channels, and what becomes of them.
struct GatesOfPart {
    float (&gates)[kChunk][kPart];  // then b from the block's begin
    float (&total)[kBlocks][kPart];
    float (&middle)[kBlocks][kPart];
};

// Step 1, of a warp's block. bias: of the part. Returns whether the block is mild.
__device__ inline bool sum_gates(const GatesOfPart& part, const KdaMatricesParams& p, const float* bias,
                                 float rate, int block, int tokens, int lane) {
    LaneGates gates(lane);
    gates.load(part.gates[block * kBlock], p.g_type);
    const GateScale scale(p, rate);
    gates.to_amounts(p.gate, scale.slope, bias, tokens);
    const bool mild = gates.sum(scale.unit);
    float before[LaneGates::kChannels];
#pragma unroll
    for (int c = 0; c < LaneGates::kChannels; c++) {
        const float other = __shfl_xor_sync(0xffffffff, gates.of[LaneGates::kTokens - 1][c], 16);
        before[c] = gates.half ? other : 0.f;
    }
    __syncwarp();  // all have read their gates
#pragma unroll
    for (int t = 0; t < LaneGates::kTokens; t++) {
        const int token = gates.first + t, unit = (gates.channel / 4) ^ (2 * (token % 4));
        const float (&b)[LaneGates::kChannels] = gates.of[t];
        const float4 x = {before[0] + b[0], before[1] + b[1], before[2] + b[2], before[3] + b[3]};
        *reinterpret_cast<float4*>(&part.gates[block * kBlock + token][4 * unit]) = x;
        if (t == LaneGates::kTokens - 1)
            *reinterpret_cast<float4*>(&(gates.half ? part.total : part.middle)[block][gates.channel]) = x;
    }
    __syncwarp();
    return __all_sync(0xffffffff, mild);
}

}  // namespace tfla_tk::kda
