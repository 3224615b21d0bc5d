// A chunk whose gates are mild, around its middle: one pair of operands serves the walk and the scores.
//   Q = s q e^{b - r}    K = k e^{r - b}    P = tril(Q K^T)    before = e^r    behind = e^{b_L - r}
// r is, per channel, the largest number not above b at the end of the chunk's first half that makes `behind`
// a power of two. The walk scales the state by `before`, reads it by Q, adds K^T V to it and scales it by
// `behind`. Equal to the form of chunk.cuh but for rounding, which is relative to each number: no factor
// leaves 2^-81 to 2^81 (fp16: 2^-5 to 2^5). K is rounded as k e^{b_L - b} would be: so the last tokens, which
// count most in the state, have next to no error where decays are fast.
//
// A warp has a block of 16 tokens and 64 channels, as in chunk.cuh, a lane four channels of eight tokens.
// Steps:
//   1. a = e^g, T of the eight tokens and of the block, and whether the block is mild.
//   2. Publish T; meet the team, which agrees. If a block is not mild, q, k and g are as they were.
//   3. From T of the chunk's blocks: Q and K in the places of q and k, their low parts in that of the log
//      gates; before, behind. Meet the team.
//   4. A warpgroup makes the scores of 64 / kParts columns, and rounds them to P, or for the mirror to P^T in
//      two parts (chunk.cuh).
#pragma once

#include "channel_gate/chunk.cuh"
#include "common/wgmma.cuh"

namespace tfla_tk::channel_gate {

// The largest sum of |log2 a| on a side of a middle that counts as mild, for every channel: no factor leaves
// 2^-81 to 2^81. NOTES: so operands of bf16 stay in its range with 45 binary digits to spare; those of fp16
// lose none of their eleven where q and k are 2^-9 or more.
template <class T> constexpr float kMildBits = std::is_same_v<T, bf16> ? 80.f : 4.f;

// The least power of two that is not less than x, which is positive and a normal number.
struct PowerOfTwo {
    uint32_t bits;
    __device__ __forceinline__ explicit PowerOfTwo(float x) {
        bits = (__float_as_uint(x) + 0x7FFFFF) & 0x7F800000;
    }
    __device__ __forceinline__ float value() const { return __uint_as_float(bits); }
    __device__ __forceinline__ float inverse() const { return __uint_as_float(0x7F000000 - bits); }
};

// Scores are made of Q and K in two parts, high and low ones, of which the walk has the high ones: the error
// of o is then that of scores made in fp32, three quarters of that with one part. kMirrors: P is stored as
// the mirror reads it (chunk.cuh).
template <class T, int kDimK, bool kMirrors> struct AroundMiddle {
    using Warp = GateWarp<T, kDimK, kMirrors>;
    using T2 = typename Warp::T2;
    static constexpr int kTokens = 8, kChannels = 4;           // of a lane
    static constexpr int kColumns = kChunk / Warp::kParts;     // of P, of a warpgroup
    static constexpr uint32_t kTileBytes = Warp::kPanelBytes;  // of 64 channels

    const Warp& of;
    float a[kTokens][kChannels];
    float total[kChannels], beside[kChannels];  // T of these eight tokens and of the block's others
    bool block_is_mild;                         // enough to be made around its own middle
    T2 q[kTokens][2], k[kTokens][2];

    // NOTES: read anew in every step, or ptxas keeps all addresses from one step to the next and spills
    struct Lane {
        uint32_t number;
        __device__ __forceinline__ uint32_t half() const { return number / 16; }  // of the block's tokens
        __device__ __forceinline__ uint32_t channel() const { return number % 16 * kChannels; }  // the first
        // Of its channels in the first of its eight rows of a tile; row_of swizzles the others.
        __device__ __forceinline__ uint32_t offset() const {
            return half() * (kTokens * kRowBytes) + 2 * channel();
        }
    };
    __device__ __forceinline__ Lane lane() const { return {static_cast<uint32_t>(of.x.lane())}; }
    // NOTES: with the tile in a uniform register one offset serves all tiles
    __device__ static __forceinline__ uint32_t row_of(uint32_t tile, uint32_t offset, int i) {
        return tile + (offset ^ (16 * i)) + i * kRowBytes;
    }

    // Steps 1 and 2; whether the chunk is mild. tokens: of the block. doubtful: the chunk is probably not.
    __device__ __forceinline__ bool is_mild(DType dtype, int tokens, bool doubtful) {
        load_gates(dtype, tokens);
        const bool mild = sum_gates();
        // NOTES: what follows is for nothing if the chunk is not mild
        if (doubtful && !__all_sync(0xffffffff, mild)) return of.agree(false);
        multiply_gates();
        const Lane lane = this->lane();
        const uint32_t offset = lane.offset();
        each<0, kTokens>([&](int i) {
            load_two(q[i], row_of(of.q(), offset, i)), load_two(k[i], row_of(of.k(), offset, i));
        });
        if (lane.half() == 0) {
            float block[kChannels];
            each<0, kChannels>([&](int c) { block[c] = total[c] * beside[c]; });
            store_four(of.totals() + of.block() * kDimK * 4 + lane.channel() * 4, block);
        }
        return of.agree(mild);
    }

    // Step 3. decay: `before` of all channels, then `behind`.
    __device__ __forceinline__ void scale_operands(float scale, uint32_t decay) {
        const int block = of.block(), number = block / 2 * 2;
        const Lane lane = this->lane();
        float x[kChannels], y[kChannels], queries[kChannels], keys[kChannels];
        const uint32_t totals = of.totals() + number * kDimK * 4 + lane.channel() * 4;
        load_four(x, totals), load_four(y, totals + kDimK * 4);
        each<0, kChannels>([&](int c) {
            const float both = x[c] * y[c];
            const float up = __fdividef(1.f, block % 3 == 0 ? both : block == 1 ? y[c] : x[c]);
            queries[c] = scale * (block < 2 ? up : block == 2 ? 1.f : x[c]);
            keys[c] = block >= 2 ? up : block == 1 ? 1.f : y[c];
            if (lane.half() == 1)
                queries[c] *= beside[c];
            else
                keys[c] *= beside[c];
            x[c] = both;
        });
        // So far relative to b at the middle; from here on to r. NOTES: in one loop ptxas spills four bytes.
        float z[kChannels];
        const uint32_t second_half = of.totals() + 2 * kDimK * 4 + lane.channel() * 4;
        load_four(y, second_half), load_four(z, second_half + kDimK * 4);
        each<0, kChannels>([&](int c) {
            const float half = y[c] * z[c];
            const PowerOfTwo behind(half);
            const float down = half * behind.inverse();
            queries[c] *= __fdividef(1.f, down), keys[c] *= down;
            x[c] = block < 2 ? x[c] * down : behind.value();
        });
        if (block % 2 == 0 && lane.half() == 0)
            store_four(decay + (block / 2 * kDimK + of.part() * kBlockChannels + lane.channel()) * 4, x);
        const uint32_t offset = lane.offset();
        const uint32_t rows = of.part() * kTileBytes + block * kBlock * kRowBytes;
        each<0, kTokens>(
            [&](int i) { scale_row<true>(of.q(), low_queries() + rows, offset, i, q[i], queries, a[i]); });
        each<0, kTokens>([&](int i) {
            const int t = kTokens - 1 - i;
            scale_row<false>(of.k(), low_keys() + rows, offset, t, k[t], keys, a[t]);
        });
        fence_async_proxy();
        of.meet();
    }

    // Step 4. meanwhile(): other work of some warps.
    template <class Meanwhile> __device__ __forceinline__ void make_scores(Meanwhile meanwhile) const {
        const uint32_t columns = of.part() * kColumns * kRowBytes;
        const Operand128B queries = rows_at(of.chunk.q), keys = rows_at(of.chunk.k + columns);
        const Operand128B more_queries = rows_at(low_queries()), more_keys = rows_at(low_keys() + columns);
        rt_fl<16, kColumns> scores;
        forget(scores);
        wgmma_fence();
        // NOTES: step by step, or ptxas keeps the descriptors of all steps from product to product
        each<0, kDimK / 16>([&](int i) {
            auto multiply = [&](const Operand128B& x, const Operand128B& y, bool accumulate) {
                wgmma_step<T, false>(scores, x.row_step(kTileBytes, i), y.row_step(kTileBytes, i),
                                     accumulate);
            };
            multiply(more_queries, keys, i > 0), multiply(queries, more_keys, true);
            multiply(queries, keys, true);
        });
        warpgroup::mma_commit_group();
        meanwhile(), __syncwarp();
        warpgroup::mma_async_wait<0>();
        pin(scores);
        store_scores(scores);
    }

  private:
    __device__ __forceinline__ uint32_t low_queries() const { return of.chunk.work; }
    __device__ __forceinline__ uint32_t low_keys() const { return of.chunk.work + Warp::kParts * kTileBytes; }

    __device__ static __forceinline__ Operand128B rows_at(uint32_t address) {
        return {(address & 0x3FFFF) >> 4 | 1 << 16};
    }
    template <class Word> __device__ static __forceinline__ void load_two(Word (&x)[2], uint32_t address) {
        auto* bits = reinterpret_cast<uint32_t*>(x);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
                     : "=r"(bits[0]), "=r"(bits[1])
                     : "r"(address)
                     : "memory");
    }

    // a = the log gates, in base e. Tokens from `tokens` on do not decay.
    __device__ __forceinline__ void load_gates(DType dtype, int tokens) {
        const Lane lane = this->lane();
        const int first = lane.half() * kTokens;
        if (dtype == DType::float32) {
            const uint32_t words = of.work() + first * kTokenBytes + lane.channel() * 4;
            each<0, kTokens>([&](int i) { load_four(a[i], words + i * kTokenBytes); });
        } else {
            const uint32_t words = of.work() + kShortGates + first * kRowBytes + lane.channel() * 2;
            const bool is_half = dtype == DType::float16;
            each<0, kTokens>([&](int i) {
                uint32_t word[2];
                load_two(word, words + i * kRowBytes);
                each<0, 2>([&](int n) {
                    const float2 x = log_gates_of(word[n], is_half);
                    a[i][2 * n] = x.x, a[i][2 * n + 1] = x.y;
                });
            });
        }
        if (tokens < kBlock)
            each<0, kTokens>([&](int i) {
                if (first + i >= tokens) each<0, kChannels>([&](int c) { a[i][c] = 0.f; });
            });
    }

    // Whether the block is mild as a part of the chunk; by itself: block_is_mild.
    __device__ __forceinline__ bool sum_gates() {
        constexpr float kMost = 0.693147181f * kMildBits<T>;
        bool mild = true, block = true;
        float sum[kChannels];
        each<0, kChannels>([&](int c) { sum[c] = fabsf(a[0][c]); });
        each<1, kTokens>([&](int i) { each<0, kChannels>([&](int c) { sum[c] += fabsf(a[i][c]); }); });
        each<0, kChannels>([&](int c) {
            block = block && sum[c] <= kMost;
            sum[c] += __shfl_xor_sync(0xffffffff, sum[c], 16);
            mild = mild && sum[c] <= kMost / 2;  // a side of the chunk's middle has two blocks
        });
        block_is_mild = __all_sync(0xffffffff, block);
        return mild;
    }

    // From log gates to gates, and T of the lane's tokens and of those beside them.
    __device__ __forceinline__ void multiply_gates() {
        each<0, kTokens>([&](int i) {
            each<0, kChannels>([&](int c) {
                constexpr float kLog2e = 1.44269504f;
                a[i][c] = exp2f(a[i][c] * kLog2e);
                total[c] = i == 0 ? a[i][c] : total[c] * a[i][c];
            });
        });
        each<0, kChannels>([&](int c) { beside[c] = __shfl_xor_sync(0xffffffff, total[c], 16); });
    }

    // A row of Q (or K) from the factors behind (or before) it, which become those behind (before) its
    // neighbour. high, low: the block's rows of both parts.
    template <bool kQueries>
    __device__ __forceinline__ void scale_row(uint32_t high, uint32_t low, uint32_t offset, int i,
                                              const T2 (&x)[2], float (&factor)[kChannels],
                                              const float (&gate)[kChannels]) const {
        if constexpr (kQueries) each<0, kChannels>([&](int c) { factor[c] *= gate[c]; });
        T2 y[2], rest[2];
        each<0, 2>([&](int n) {
            const HighAndLow<T2> both(to_float2(x[n]) * float2{factor[2 * n], factor[2 * n + 1]});
            y[n] = both.high, rest[n] = both.low;
        });
        if constexpr (!kQueries) each<0, kChannels>([&](int c) { factor[c] *= gate[c]; });
        store_shared(row_of(high, offset, i), y);
        store_shared(row_of(low, offset, i), rest);
    }

    // Rounds this warp's 16 rows; nothing above the diagonal.
    __device__ __forceinline__ void store_scores(const rt_fl<16, kColumns>& scores) const {
        const int lane = of.x.lane(), row = of.block() * kBlock + lane / 4;
        const int column = of.part() * kColumns + lane % 4 * 2;
        auto visible = [&](int j, int n) {
            const float2 x = scores.tiles[0][j].data[n];
            const int behind = column + 16 * j + n / 2 * 8 - (row + n % 2 * 8);  // of x.x; visible: <= 0
            return float2{behind <= 0 ? x.x : 0.f, behind < 0 ? x.y : 0.f};
        };
        if constexpr (kMirrors) {
            each<0, kColumns / 16>([&](int j) {
                const int block = of.part() * (kColumns / 16) + j;
                if (block <= of.block())
                    of.store_parts(of.block(), block,
                                   {visible(j, 0), visible(j, 1), visible(j, 2), visible(j, 3)});
            });
            return;
        }
        const uint32_t to = of.chunk.p + panel_offset(of.block() * kBlock + lane % 16, lane / 16);
        each<0, kColumns / 16>([&](int j) {
            T2 y[4];
            each<0, 4>([&](int n) { y[n] = from_float2<T2>(visible(j, n)); });
            move<T2>::stsm4(to ^ (32 * j + of.part() * kColumns * 2), y[0], y[1], y[2], y[3]);
        });
    }
};

}  // namespace tfla_tk::channel_gate
