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
#pragma once

#include "channel_gate/fragments.cuh"
#include "common/operand.h"
#include "common/register_steps.cuh"
#include "common/sync.cuh"

namespace tfla_tk::channel_gate {

constexpr int kBlock = 16;          // tokens of a block
constexpr int kBlockChannels = 64;  // of K

// A block's memory for operands: of each token two rows of 128 bytes. The log gates are loaded there: fp32
// ones in place of both rows, 16-bit ones as rows of 128 bytes in the second half, which no operand is
// written to before they are read. Rows of q and k are operands, too, once they have been read: level n is in
//   1: first rows      2: rows of q      4: rows of k      8: second rows
constexpr uint32_t kRowBytes = 128, kTokenBytes = 2 * kRowBytes;
constexpr uint32_t kBlockBytes = kBlock * kTokenBytes;
constexpr uint32_t kShortGates = kBlock * kRowBytes;  // where they begin
constexpr uint32_t kSecondRow = kRowBytes;

// A lane has two channels of all tokens.
template <class T> struct BlockOfWarp {
    using T2 = typename base_types::packing<T>::packed_type;
    using Pair = Fragment<T2>;

    uint32_t lane_at;      // where this lane's number is in shared memory
    float2 total[kBlock];  // T_n of the block that begins here
    float2 qf[kBlock];     // q F_n
    float2 kg[kBlock];     // k G_n
    float p[2][4];         // scores over these 64 channels, of two times eight columns

    // NOTES: from shared memory, so that every step computes its addresses anew; ptxas kept and spilled them.
    __device__ __forceinline__ int lane() const { return load_anew(lane_at); }

    // The address of this lane's channels of token t in rows `stride` bytes apart.
    // NOTES: `rows` is in a uniform register, so one offset serves all tiles.
    template <int stride> __device__ static __forceinline__ uint32_t at(uint32_t rows, int lane, int t) {
        return rows + ((4 * lane) ^ t % 8 * 16) + t * stride;
    }
    // For ldmatrix of 16 rows, as A or B, the address of channels 0 to 15; that of 16 i is XORed with 32 i.
    template <int stride> __device__ __forceinline__ uint32_t rows_of_a(uint32_t rows) const {
        const int lane = this->lane();
        return rows + lane % 16 * stride + ((lane / 16) ^ lane % 8) * 16;
    }
    template <int stride> __device__ __forceinline__ uint32_t rows_of_b(uint32_t rows) const {
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
            const T2 ql = load_pair_of<T2>(at<kRowBytes>(q, lane, l));
            const T2 qr = load_pair_of<T2>(at<kRowBytes>(q, lane, r));
            const T2 kl = load_pair_of<T2>(at<kRowBytes>(k, lane, l));
            const T2 kr = load_pair_of<T2>(at<kRowBytes>(k, lane, r));
            qf[l] = to_float2(ql) * total[l], qf[r] = to_float2(qr) * total[r];
            if constexpr (kStore) {
                store_pair_of(at<kTokenBytes>(work, lane, l), kl);
                store_rounded<T2>(at<kTokenBytes>(work, lane, r), qf[r]);
            }
            kg[l] = to_float2(kl) * total[r], kg[r] = to_float2(kr);
            qf[r] = qf[r] * total[l], total[l] = total[l] * total[r];
        });
    }

    // The operand rows of level n, of eight tokens.
    template <int n, int stride, int first> __device__ __forceinline__ void store_level(uint32_t rows) const {
        const int lane = this->lane();
        each<first, first + 8>(
            [&](int t) { store_rounded<T2>(at<stride>(rows, lane, t), t & n ? qf[t] : kg[t]); });
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

    // q F, k G and T of blocks of eight, of eight tokens, and the operands of all levels. Each lane writes
    // over rows of q and k what it alone has read there.
    template <int first>
    __device__ __forceinline__ void load_eight(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                               int tokens) {
        load_gates<first>(work, dtype, tokens), __syncwarp();
        load_operands<first>(q, k, work), __syncwarp();
        store_level<2, kRowBytes, first>(q), join<2, first>(), __syncwarp();
        store_level<4, kRowBytes, first>(k), join<4, first>();
        store_level<8, kTokenBytes, first>(work + kSecondRow);
    }

    // X Y^T of eight rows each, over 64 channels: this lane's two scores.
    template <int stride, bool kSame = false>
    __device__ __forceinline__ float2 multiply_eight(uint32_t x, uint32_t y) const {
        const int lane = this->lane();
        const uint32_t row = lane % 8 * stride + ((lane / 8) ^ lane % 8) * 16;
        float c[4];
        each<0, 2>([&](int i) {
            const Pair a(x + (row ^ i * 64)), b = kSame ? a : Pair(y + (row ^ i * 64));
            multiply_8(c, a, b, 0, i > 0), multiply_8(c, a, b, 2, true);
        });
        return {c[0], c[1]};
    }
    // X X^T likewise.
    template <int stride> __device__ __forceinline__ float2 multiply_eight(uint32_t x) const {
        return multiply_eight<stride, true>(x, x);
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
    // Levels 1, 2 and 4 of eight tokens.
    template <int first>
    __device__ __forceinline__ void multiply_levels(uint32_t q, uint32_t k, uint32_t work) {
        const uint32_t rows = work + first * kTokenBytes;
        const uint32_t of_q = q + first * kRowBytes, of_k = k + first * kRowBytes;
        take<1, first>(multiply_eight<kTokenBytes>(rows));
        take<2, first>(multiply_eight<kRowBytes>(of_q));
        take<4, first>(multiply_eight<kRowBytes>(of_k));
    }

    // All levels of the block: scores p, q F, k G and T of 16 tokens. q, k: its rows in the tiles. work: its
    // memory, with the log gates. NOTES: eight tokens after eight, for the registers.
    __device__ __forceinline__ void by_levels(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                              int tokens) {
        take<0, 0>(multiply_eight<kRowBytes>(q, k));
        take<0, 8>(multiply_eight<kRowBytes>(q + 8 * kRowBytes, k + 8 * kRowBytes));
        load_eight<0>(q, k, work, dtype, tokens), __syncwarp();
        multiply_levels<0>(q, k, work);
        load_eight<8>(q, k, work, dtype, tokens), __syncwarp();
        multiply_levels<8>(q, k, work);
        const uint32_t second = work + kSecondRow;
        const float2 below = multiply_eight<kTokenBytes>(second + 8 * kTokenBytes, second);
        p[0][2] = below.x, p[0][3] = below.y, p[1][0] = p[1][1] = 0.f;
        join<8, 0, kBlock>();
    }

    // q F, k G and T of blocks of eight, of eight tokens, and the operands around the middle of the 16: with
    // m = b at its end of the first eight, q e^{b - m} into first rows, k e^{m - b} into second ones.
    template <int first>
    __device__ __forceinline__ void load_eight_around_middle(uint32_t q, uint32_t k, uint32_t work,
                                                             DType dtype, int tokens) {
        load_gates<first>(work, dtype, tokens), __syncwarp();
        load_operands<first, false>(q, k, work), join<2, first>(), join<4, first>();
        const int lane = this->lane();
        const float2 up{__fdividef(1.f, total[first].x), __fdividef(1.f, total[first].y)};
        each<first, first + 8>([&](int t) {
            store_rounded<T2>(at<kTokenBytes>(work, lane, t), first == 0 ? qf[t] * up : qf[t]);
            store_rounded<T2>(at<kTokenBytes>(work + kSecondRow, lane, t), first == 0 ? kg[t] : kg[t] * up);
        });
    }

    // The same as by_levels, of a block whose gates are mild on both sides of its middle: one product.
    __device__ __forceinline__ void around_middle(uint32_t q, uint32_t k, uint32_t work, DType dtype,
                                                  int tokens) {
        load_eight_around_middle<0>(q, k, work, dtype, tokens);
        load_eight_around_middle<8>(q, k, work, dtype, tokens), __syncwarp();
        join<8, 0, kBlock>();
        const uint32_t a_rows = rows_of_a<kTokenBytes>(work),
                       b_rows = rows_of_b<kTokenBytes>(work + kSecondRow);
        each<0, 4>([&](int i) {
            const Pair a(a_rows ^ i * 32), b(b_rows ^ i * 32);
            each<0, 2>([&](int n) { multiply_16(p[n], a, b, n, i > 0); });
        });
        const int lane = this->lane(), row = lane / 4, column = lane % 4 * 2;
        each<0, 2>([&](int e) {  // nothing above the diagonal
            if (row < column + e) p[0][e] = p[1][2 + e] = 0.f;
            p[1][e] = 0.f;
        });
    }
};

}  // namespace tfla_tk::channel_gate
