// Factors of the gates, and scores by levels, in one warp's block of 16 tokens and 64 channels.
//
// With a_t = e^{g_t} and, per channel, for blocks of n = 1, 2, 4 .. tokens,
//   F_n(t)  product of a over t's block up to and with t      G_n(t)  product of a behind t in its block
//   T_n     product of a over the block
// two blocks of n, a left and a right one, become one of 2 n:
//   F_2n = F_n T_n(left) in the right one, F_n in the left    G_2n = G_n T_n(right) in the left one, G_n in
//   the right                                                 T_2n = T_n(left) T_n(right)
// Token i of the right block sees token j of the left one by the factor F_n(i) G_n(j). So with the rows
//   X_n(t) = q F_n in right blocks, k G_n in left ones
// the scores of level n are X_n X_n^T where i is in a right block and j in the left one beside it. Every pair
// j < i is of one level, and a pair i = i is q k. For gates <= 0 no factor exceeds 1, and none is a quotient:
// gates of 0 and of -inf are exact.
//
// The rows are in fp32 and their products in tf32, whose 11 binary digits cost P next to nothing of bf16's
// eight. fp16 has as many digits itself, so for it products within the block have two parts:
//   x y = (high + low)_x (high + low)_y, without low low
#pragma once

#include "channel_gate/fragments.cuh"
#include "common/operand.h"
#include "common/register_steps.cuh"
#include "common/sync.cuh"

namespace tfla_tk::channel_gate {

constexpr int kBlock = 16;          // tokens of a block
constexpr int kBlockChannels = 64;  // of K

// A block's memory for operands has a row of 256 bytes per token. The log gates are loaded there: fp32 ones
// over all of it, 16-bit ones as rows of 128 bytes in the second half, which no operand is written to before
// they are read.
constexpr uint32_t kRowBytes = 128, kTokenBytes = 2 * kRowBytes;
constexpr uint32_t kBlockBytes = kBlock * kTokenBytes;
constexpr uint32_t kShortGates = kBlock * kRowBytes;  // where they begin

// Rows of operands in fp32, by where the first one has channels 0 to 31 and 32 to 63.
template <uint32_t stride> struct FloatRows {
    static constexpr uint32_t kStride = stride;  // from token to token
    uint32_t channels_0, channels_32;

    __device__ __forceinline__ FloatRows from(int t) const {
        return {channels_0 + t * kStride, channels_32 + t * kStride};
    }
    // Where a lane's two channels of token t are. NOTES: the base is in a uniform register.
    __device__ __forceinline__ uint32_t at(int lane, int t) const {
        const uint32_t offset = 8 * (lane % 16) + lane / 16 * (channels_32 - channels_0);
        return channels_0 + (offset ^ t % 8 * 16) + t * kStride;
    }
};
// First rows of a block: its memory.
__device__ __forceinline__ FloatRows<kTokenBytes> first_rows(uint32_t work) {
    return {work, work + kRowBytes};
}
// Second rows: in the places of q and k, once these have been read.
__device__ __forceinline__ FloatRows<kRowBytes> second_rows(uint32_t q, uint32_t k) { return {q, k}; }

// A lane has two channels of all tokens.
template <class T> struct BlockOfWarp {
    using T2 = typename base_types::packing<T>::packed_type;
    static constexpr bool kTwoParts = !std::is_same_v<T, bf16>;  // of operands of the block's scores
    // A factor of q F and k G, for their products in tf32. The walk's operands are without it.
    static constexpr float kScaled = kTwoParts ? 1.f : kTf32Mean;
    // Steps of the products' loops that are unrolled. NOTES: of products in two parts not all, or ptxas loads
    // ahead and spills; of eight rows two, or it serialises the mirror's wgmma (C7511).
    static constexpr int kEightUnrolled = kTwoParts ? 2 : 4, kMiddleUnrolled = kTwoParts ? 1 : 8;

    uint32_t lane_at;      // where this lane's number is in shared memory
    float2 total[kBlock];  // T_n of the block that begins here
    float2 qf[kBlock];     // q F_n kScaled
    float2 kg[kBlock];     // k G_n kScaled
    float p[2][4];         // scores over these 64 channels, of two times eight columns

    // NOTES: from shared memory, so that every step computes its addresses anew; ptxas kept and spilled them.
    __device__ __forceinline__ int lane() const { return load_anew(lane_at); }

    // The address of this lane's channels of token t in rows of q or k.
    // NOTES: `rows` is in a uniform register, so one offset serves all tiles.
    __device__ static __forceinline__ uint32_t at(uint32_t rows, int lane, int t) {
        return rows + ((4 * lane) ^ t % 8 * 16) + t * kRowBytes;
    }
    // For ldmatrix of 16 rows, as A or B, the address of the first 32 bytes; that of the i-th ones is XORed
    // with 32 i.
    __device__ __forceinline__ uint32_t rows_of_a(uint32_t rows, uint32_t stride) const {
        const int lane = this->lane();
        return rows + lane % 16 * stride + ((lane / 16) ^ lane % 8) * 16;
    }
    __device__ __forceinline__ uint32_t rows_of_b(uint32_t rows, uint32_t stride) const {
        const int lane = this->lane();
        return rows + (lane / 16 * 8 + lane % 8) * stride + (lane / 8 % 2 ^ lane % 8) * 16;
    }

    // total = e^g of eight tokens. Tokens from `tokens` on do not decay.
    template <int first> __device__ __forceinline__ void load_gates(uint32_t work, DType dtype, int tokens) {
        const int lane = this->lane();
        if (dtype == DType::float32) {
            each<first, first + 8>([&](int t) { total[t] = load_floats(work + 8 * lane + t * kTokenBytes); });
        } else {
            const uint32_t words = work + kShortGates + 4 * lane;
            const bool is_half = dtype == DType::float16;
            each<first, first + 8>([&](int t) {
                const uint32_t word = load_word(words + t * kRowBytes);
                const float2 x = to_float2(reinterpret_cast<const bf16_2&>(word));
                const float2 y = to_float2(reinterpret_cast<const half_2&>(word));
                total[t] = {is_half ? y.x : x.x, is_half ? y.y : x.y};
            });
        }
        if (tokens < first + 8)
            each<first, first + 8>([&](int t) {
                if (t >= tokens) total[t] = {0.f, 0.f};
            });
        each<first, first + 8>([&](int t) {
            constexpr float kLog2e = 1.44269504f;
            total[t] = {exp2f(total[t].x * kLog2e), exp2f(total[t].y * kLog2e)};
        });
    }

    // q F and k G of blocks of two, of eight tokens, from rows of q and k. kStore: the operand of level 1
    // into first rows.
    template <int first, bool kStore = true>
    __device__ __forceinline__ void load_operands(uint32_t q, uint32_t k, uint32_t work) {
        const int lane = this->lane();
        each<first / 2, first / 2 + 4>([&](int i) {
            const int l = 2 * i, r = l + 1;
            auto load = [&](uint32_t rows, int t) {
                return to_float2(load_pair_of<T2>(at(rows, lane, t))) * kScaled;
            };
            const float2 ql = load(q, l), qr = load(q, r), kl = load(k, l), kr = load(k, r);
            qf[l] = ql * total[l], qf[r] = qr * total[r];
            if constexpr (kStore) {
                const auto rows = first_rows(work);
                store_floats(rows.at(lane, l), kl), store_floats(rows.at(lane, r), qf[r]);
            }
            kg[l] = kl * total[r], kg[r] = kr;
            qf[r] = qf[r] * total[l], total[l] = total[l] * total[r];
        });
    }

    // The operand rows of level n, of eight tokens.
    template <int n, int first, class Rows> __device__ __forceinline__ void store_level(Rows rows) const {
        const int lane = this->lane();
        each<first, first + 8>([&](int t) { store_floats(rows.at(lane, t), t & n ? qf[t] : kg[t]); });
    }

    // From blocks of n to blocks of 2 n.
    template <int n, int first, int count = 8> __device__ __forceinline__ void join() {
        each<first, first + count>([&](int t) {
            const int left = t / (2 * n) * 2 * n;
            if (t & n)
                qf[t] = qf[t] * total[left];
            else
                kg[t] = kg[t] * total[left + n];
        });
        each<first / (2 * n), (first + count) / (2 * n)>(
            [&](int i) { total[2 * n * i] = total[2 * n * i] * total[2 * n * i + n]; });
    }

    // multiply(a, b), in two parts where the operands need them.
    template <class Multiply>
    __device__ static __forceinline__ void multiply_parts(const FloatFragment& a, const FloatFragment& b,
                                                          Multiply multiply) {
        if constexpr (kTwoParts) {
            multiply(a.low(), b.high()), multiply(a.high(), b.low());
            multiply(a.high(), b.high());
        } else {
            multiply(a, b);
        }
    }

    // The rows of ldmatrix for products of eight rows with eight: four units of 16 bytes of each. Units 0 and
    // 2 are the upper half of A, units 1 and 3 its lower half. B has them in the order 0, 2, 1, 3, so its
    // first half meets the upper one of A and its second half the lower one. Addresses are relative to the
    // first row, for rows of 128 bytes; longer rows add `row`.
    struct EightRows {
        uint32_t a, b, row;
        __device__ __forceinline__ explicit EightRows(int lane) {
            const int t = lane % 8;
            row = t * kRowBytes;
            a = row + (lane / 8 ^ t) * 16, b = row + ((lane / 8 % 2 * 2 + lane / 16) ^ t) * 16;
        }
        __device__ __forceinline__ uint32_t further(uint32_t stride) const {
            return stride == kRowBytes ? 0 : row;
        }
    };
    // This lane's two scores: the upper half of A with the first half of B, the lower with the second.
    __device__ static __forceinline__ float2 halves(const float (&c)[2][4]) {
        return {c[0][0] + c[1][2], c[0][1] + c[1][3]};
    }

    // q k^T of eight rows each, over 64 channels.
    __device__ __forceinline__ float2 multiply_pairs(const EightRows& eight, uint32_t q, uint32_t k) const {
        float c[2][4];
        each<0, 2>([&](int i) {
            const Fragment<T2> a(q + (eight.a ^ i * 64)), b(k + (eight.b ^ i * 64));
            each<0, 2>([&](int n) { multiply_16(c[n], a, b, n, i > 0); });
        });
        return halves(c);
    }
    // X Y^T of eight rows in fp32, likewise.
    template <bool kSame = false, class Rows>
    __device__ __forceinline__ float2 multiply_eight(const EightRows& eight, Rows x, Rows y) const {
        const uint32_t more = eight.further(Rows::kStride);
        float c[2][4]{};
#pragma unroll(kEightUnrolled)
        for (int i = 0; i < 4; i++) {
            const FloatFragment a((i / 2 ? x.channels_32 : x.channels_0) + ((eight.a + more) ^ i % 2 * 64));
            const uint32_t of_y = (i / 2 ? y.channels_32 : y.channels_0) + ((eight.b + more) ^ i % 2 * 64);
            const FloatFragment b = kSame ? a.as_b_of_eight() : FloatFragment(of_y);
            multiply_parts(a, b, [&](const FloatFragment& u, const FloatFragment& w) {
                each<0, 2>([&](int n) { multiply_16(c[n], u, w, n, true); });
            });
        }
        return halves(c);
    }
    // X X^T likewise.
    template <class Rows>
    __device__ __forceinline__ float2 multiply_eight(const EightRows& eight, Rows x) const {
        return multiply_eight<true>(eight, x, x);
    }

    // Takes over the scores of level n of the eight tokens from `first`; n = 0: those of the diagonal, and
    // zero beside it.
    template <int n, int first> __device__ __forceinline__ void take(float2 c) {
        const int lane = this->lane(), row = lane / 4, column = lane % 4 * 2;
        each<0, 2>([&](int e) {
            const int differ = row ^ (column + e);
            const bool of_level = n == 0 ? differ == 0 : row > column + e && differ >= n && differ < 2 * n;
            float& to = p[first / 8][first / 4 + e];
            to = of_level ? (e ? c.y : c.x) : n == 0 ? 0.f : to;
        });
    }
    // q F, k G and T of blocks of eight, of eight tokens, their scores of levels 1, 2 and 4, and the operands
    // of level 8 in second rows.
    template <int first>
    __device__ __forceinline__ void make_eight(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                               int tokens) {
        const auto rows = first_rows(work);
        const auto more = second_rows(q, k);
        load_gates<first>(work, dtype, tokens), __syncwarp();
        load_operands<first>(q, k, work), __syncwarp();
        store_level<2, first>(more), join<2, first>(), __syncwarp();
        const EightRows eight(lane());
        take<1, first>(multiply_eight(eight, rows.from(first)));
        take<2, first>(multiply_eight(eight, more.from(first))), __syncwarp();
        store_level<4, first>(rows), join<4, first>();
        store_level<8, first>(more), __syncwarp();
        take<4, first>(multiply_eight(eight, rows.from(first)));
    }

    // q F and k G of the first eight tokens to memory and back, for the registers. k G is there already: it
    // is the operand of level 8.
    __device__ __forceinline__ void put_away(uint32_t work) const {
        const int lane = this->lane();
        each<0, 8>([&](int t) { store_floats(first_rows(work).at(lane, t), qf[t]); });
    }
    __device__ __forceinline__ void take_back(uint32_t q, uint32_t k, uint32_t work) {
        const int lane = this->lane();
        each<0, 8>([&](int t) {
            qf[t] = load_floats(first_rows(work).at(lane, t));
            kg[t] = load_floats(second_rows(q, k).at(lane, t));
        });
    }

    // All levels of the block: scores p, q F, k G and T of 16 tokens. q, k: its rows in the tiles. work: its
    // memory, with the log gates. NOTES: eight tokens after eight, for the registers.
    __device__ __forceinline__ void by_levels(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                              int tokens) {
        {
            const EightRows eight(lane());
            take<0, 0>(multiply_pairs(eight, q, k));
            take<0, 8>(multiply_pairs(eight, q + 8 * kRowBytes, k + 8 * kRowBytes));
        }
        make_eight<0>(q, k, work, dtype, tokens), __syncwarp(), put_away(work);
        make_eight<8>(q, k, work, dtype, tokens);
        const auto rows = second_rows(q, k);
        const float2 below = multiply_eight(EightRows(lane()), rows.from(8), rows);
        p[0][2] = below.x, p[0][3] = below.y, p[1][0] = p[1][1] = 0.f;
        take_back(q, k, work), join<8, 0, kBlock>();
    }

    // q F, k G and T of blocks of eight, of eight tokens, and the operands around the middle of the 16: with
    // m = b at its end of the first eight, q e^{b - m} into first rows, k e^{m - b} into second ones.
    template <int first>
    __device__ __forceinline__ void load_eight_around_middle(uint32_t q, uint32_t k, uint32_t work,
                                                             DType dtype, int tokens) {
        load_gates<first>(work, dtype, tokens), __syncwarp();
        load_operands<first, false>(q, k, work), join<2, first>(), join<4, first>(), __syncwarp();
        const int lane = this->lane();
        const float2 up{__fdividef(1.f, total[first].x), __fdividef(1.f, total[first].y)};
        each<first, first + 8>([&](int t) {
            store_floats(first_rows(work).at(lane, t), first == 0 ? qf[t] * up : qf[t]);
            store_floats(second_rows(q, k).at(lane, t), first == 0 ? kg[t] : kg[t] * up);
        });
    }

    // The same as by_levels, of a block whose gates are mild on both sides of its middle: one product.
    __device__ __forceinline__ void around_middle(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                                  int tokens) {
        load_eight_around_middle<0>(q, k, work, dtype, tokens);
        load_eight_around_middle<8>(q, k, work, dtype, tokens), __syncwarp();
        const uint32_t a_rows = rows_of_a(work, kTokenBytes), b_rows = rows_of_b(q, kRowBytes);
        each<0, 8>([&](int i) { p[i / 4][i % 4] = 0.f; });
#pragma unroll(kMiddleUnrolled)
        for (int i = 0; i < 8; i++) {
            const FloatFragment a((a_rows ^ i % 4 * 32) + i / 4 * kRowBytes);
            const FloatFragment b((b_rows ^ i % 4 * 32) + i / 4 * (k - q));
            multiply_parts(a, b, [&](const FloatFragment& u, const FloatFragment& w) {
                each<0, 2>([&](int n) { multiply_16(p[n], u, w, n, true); });
            });
        }
        const int lane = this->lane(), row = lane / 4, column = lane % 4 * 2;
        if constexpr (kTwoParts) {  // NOTES: from memory, so that they take no registers under the products
            each<0, 8>([&](int t) { kg[t] = load_floats(second_rows(q, k).at(lane, t)); });
            each<8, kBlock>([&](int t) { qf[t] = load_floats(first_rows(work).at(lane, t)); });
        }
        join<8, 0, kBlock>();
        each<0, 2>([&](int e) {  // nothing above the diagonal
            if (row < column + e) p[0][e] = p[1][2 + e] = 0.f;
            p[1][e] = 0.f;
        });
    }
};

}  // namespace tfla_tk::channel_gate
