// What a team of gate warps makes of a chunk: the operands of a walk over the state, and the scores.
//   P = s tril(sum_c q_ic k_jc e^{b_ic - b_jc})      s q e^b      k e^{b_L - b}      e^{b_L}
// b is the sum of g over the chunk's tokens up to and with a token, b_L over all of it. It is never computed:
// in the terms of block.cuh e^b = F_64, e^{b_L - b} = G_64 and e^{b_L} = T_64.
//
// A warp of the team has a block of 16 tokens and 64 channels. Steps:
//   1. Levels 1 to 8 within the block, or the block around its own middle where its gates are mild
//      (block.cuh). Until here each warp has its block's memory to itself.
//   2. Publish T_16 and, for channels from 64 on, the scores so far, in places of P; meet the team.
//   3. From the T_16 of all blocks: rows of the operands of levels 16 and 32, the operands of the walk in
//      registers, and e^{b_L}. Meet the team.
//   4. Scores of the diagonal block and those below it, levels 16 and 32, over all channels; round them to
//      P, or for the mirror to P^T in two parts, high + low.
//   5. Meet the team, then put the operands of the walk into the places of q and k.
#pragma once

#include "channel_gate/block.cuh"
#include "sequence/cut.h"

namespace tfla_tk::channel_gate {

constexpr int kBlocks = kChunk / kBlock;

// The forward has P in a panel. The mirror has P^T in two parts, high + low, in one panel of 80 rows. This
// panel holds only the 16 x 16 blocks on and below P's diagonal. The parts of block (i, j), j <= i, are
//   high: in the rows of block j and the columns of block i
//   low:  in the rows of block 4 - i + j and the columns of block 3 - i
// So of each part, the blocks of one i form a B operand of N = 16 (i + 1) rows and k = 16 columns.
constexpr int kLowRows = kBlock;  // of the panel, behind those of a chunk
constexpr __device__ int low_row(int i, int j) { return (kBlocks - i + j) * kBlock; }
constexpr __device__ int low_column(int i) { return (kBlocks - 1 - i) * kBlock; }

// A chunk in shared memory, by addresses.
struct ChunkPlaces {
    uint32_t q, k;   // tiles of 64-column panels; they become s q e^b and k e^{b_L - b}
    uint32_t work;   // memory of the blocks, 64 channels after 64, with the log gates
    uint32_t p;      // scores; of the forward zero above the diagonal blocks in the first 16 rows
    uint32_t decay;  // e^{b_L}, fp32
};

template <class T, int kDimK, bool kMirrors> struct GateWarp {
    using T2 = typename base_types::packing<T>::packed_type;
    static constexpr int kParts = kDimK / kBlockChannels;  // of K
    static_assert(kParts == 1 || kParts == 2);
    static constexpr int kWarps = kBlocks * kParts;  // of a team
    static constexpr uint32_t kPanelBytes = kChunk * kRowBytes, kPartBytes = kBlocks * kBlockBytes;

    ChunkPlaces chunk;
    int team, warp;  // warp: of the team
    BlockOfWarp<T> x;
    T2 queries[kBlock], keys[kBlock];  // s q e^b and k e^{b_L - b}

    __device__ __forceinline__ int block() const { return warp % kBlocks; }
    __device__ __forceinline__ int part() const { return warp / kBlocks; }
    // of the block: rows of q and k, and its memory
    __device__ __forceinline__ uint32_t q() const {
        return chunk.q + part() * kPanelBytes + block() * kBlock * kRowBytes;
    }
    __device__ __forceinline__ uint32_t k() const {
        return chunk.k + part() * kPanelBytes + block() * kBlock * kRowBytes;
    }
    __device__ __forceinline__ uint32_t work() const {
        return chunk.work + part() * kPartBytes + block() * kBlockBytes;
    }
    // In rows 16 to 47 and from 48 on of P, which no score is written to before step 4.
    __device__ __forceinline__ uint32_t partial() const { return chunk.p + (16 + block() * 8) * kRowBytes; }
    __device__ __forceinline__ uint32_t totals() const {
        return chunk.p + 48 * kRowBytes + part() * kBlockChannels * 4;
    }

    // All warps of the team. NOTES: a named barrier per team; 0 is __syncthreads.
    __device__ __forceinline__ void meet() const {
        if (team == 0)
            asm volatile("bar.sync 1, %0;\n" ::"n"(32 * kWarps) : "memory");
        else
            asm volatile("bar.sync 2, %0;\n" ::"n"(32 * kWarps) : "memory");
    }

    // meet(), and whether `so` was for all threads.
    __device__ __forceinline__ bool agree(bool so) const {
        __syncwarp();
        int all;
#define TFLA_AGREE(barrier)                                                               \
    asm volatile(                                                                         \
        "{.reg .pred one, all; setp.ne.s32 one, %1, 0;\n"                                 \
        "barrier.cta.red.and.pred all, " #barrier ", %2, one; selp.s32 %0, 1, 0, all;}\n" \
        : "=r"(all)                                                                       \
        : "r"(static_cast<int>(so)), "n"(32 * kWarps)                                     \
        : "memory")
        if (team == 0)
            TFLA_AGREE(1);
        else
            TFLA_AGREE(2);
#undef TFLA_AGREE
        return __any_sync(0xffffffff, all);
    }

    // Step 1. tokens: of the chunk.
    __device__ __forceinline__ void make_levels_of_block(DType dtype, int tokens) {
        x.by_levels(q(), k(), work(), dtype, tokens - block() * kBlock);
    }
    // The same where the block's gates are mild.
    __device__ __forceinline__ void make_block_around_middle(DType dtype, int tokens) {
        x.around_middle(q(), k(), work(), dtype, tokens - block() * kBlock);
    }

    // Step 2, where P's place is free.
    __device__ __forceinline__ void publish() {
        store_floats(totals() + block() * kDimK * 4 + x.lane() * 8, x.total[0]);
        if (part() > 0) each<0, 2>([&](int i) { store_four(partial() + x.lane() * 16 + 512 * i, x.p[i]); });
        meet();
    }

    // Step 3.
    __device__ __forceinline__ void scale_operands(float scale) {
        float2 t[kBlocks];
        const uint32_t pair = totals() + x.lane() * 8;
        each<0, kBlocks>([&](int i) { t[i] = load_floats(pair + i * kDimK * 4); });
        if (kParts > 1 && part() == 0) add_partial();
        const int block = this->block();
        const float2 one{1.f, 1.f}, first = t[0] * t[1], last = t[2] * t[3];
        const float2 left = pick(block == 3, t[2], one), right = pick(block == 0, t[1], one);
        store_levels(left, right);
        constexpr float kBack = 1.f / BlockOfWarp<T>::kScaled;
        const float2 before = pick(block / 2, first * left, pick(block == 1, t[0], one)) * (scale * kBack);
        const float2 behind = pick(block / 2 == 0, last * right, pick(block == 2, t[3], one)) * kBack;
        each<0, kBlock>([&](int i) {
            queries[i] = from_float2<T2>(x.qf[i] * before), keys[i] = from_float2<T2>(x.kg[i] * behind);
        });
        if (block == 0)
            store_floats(chunk.decay + (part() * kBlockChannels + 2 * x.lane()) * 4, first * last);
        meet();
    }

    // Step 4.
    __device__ __forceinline__ void make_scores(float scale) {
        if (part() == 0) store_scores(block(), block(), x.p, scale);
#pragma unroll 1
        for (int n = warp; n < 6; n += kWarps) {  // (1, 0), (3, 2) by level 16, the others by level 32
            const int row = n < 2 ? 2 * n + 1 : n / 2 + 1, column = n < 2 ? 2 * n : n % 2;
            float c[2][4];
            multiply_blocks(c, n < 2, row, column);
            store_scores(row, column, c, scale);
        }
        if (!kMirrors && kParts > 1 && warp == 6) {  // nothing above the diagonal, where partial sums were
            const float nothing[2][4]{};
            store_scores(1, 2, nothing, 0.f), store_scores(1, 3, nothing, 0.f);
            store_scores(2, 3, nothing, 0.f);
        }
    }

    // Step 5.
    __device__ __forceinline__ void store_operands() const {
        meet();
        const int lane = x.lane();
        const uint32_t to_q = q(), to_k = k();
        each<0, kBlock>([&](int i) {
            store_pair_of(x.at(to_q, lane, i), queries[i]), store_pair_of(x.at(to_k, lane, i), keys[i]);
        });
    }

    // Stores block (row, column) of P as the mirror's P^T in two parts. x: the lane's numbers of the block,
    // in the order of an accumulator of wgmma.
    __device__ __forceinline__ void store_parts(int row, int column, const float2 (&x)[4]) const {
        const int lane = this->x.lane();
        const uint32_t to = chunk.p + lane_of_block(lane, column, row);
        T2 high[4], low[4];
        each<0, 4>([&](int n) {
            const HighAndLow<T2> both(x[n]);
            high[n] = both.high, low[n] = both.low;
        });
        move<T2>::stsm4t(to, high[0], high[1], high[2], high[3]);
        const uint32_t more = chunk.p + lane_of_block(lane, kBlocks - row + column, kBlocks - 1 - row);
        move<T2>::stsm4t(more, low[0], low[1], low[2], low[3]);
    }

  private:
    // Where this lane's row of a block is in the panel of scores, for a transposed stmatrix.
    __device__ static __forceinline__ uint32_t lane_of_block(int lane, int row, int column) {
        return panel_offset(kBlock * row + transposed_row(lane), 2 * column + lane / 8 % 2);
    }

    __device__ __forceinline__ void add_partial() {
        each<0, 2>([&](int i) {
            float more[4];
            load_four(more, partial() + x.lane() * 16 + 512 * i);
            each<0, 4>([&](int e) { x.p[i][e] += more[e]; });
        });
    }

    // Rows of the operands of level 16, first ones, and of level 32, second ones.
    __device__ __forceinline__ void store_levels(float2 left, float2 right) const {
        const int block = this->block(), lane = x.lane();
        const auto rows = first_rows(work());
        const auto more = second_rows(q(), k());
        constexpr float kMore = kTf32Mean / BlockOfWarp<T>::kScaled;
        if (block % 2)
            each<0, kBlock>([&](int i) { store_floats(rows.at(lane, i), x.qf[i] * kMore); });
        else
            each<0, kBlock>([&](int i) { store_floats(rows.at(lane, i), x.kg[i] * kMore); });
        left = left * kMore, right = right * kMore;
        if (block / 2)
            each<0, kBlock>([&](int i) { store_floats(more.at(lane, i), x.qf[i] * left); });
        else
            each<0, kBlock>([&](int i) { store_floats(more.at(lane, i), x.kg[i] * right); });
    }

    // c = X Y^T of the rows of two blocks, by level 16 or 32, over all channels.
    __device__ __forceinline__ void multiply_blocks(float (&c)[2][4], bool by_16, int row, int column) const {
        // NOTES: by numbers, or both levels have code of their own
        const uint32_t rows = by_16 ? chunk.work : chunk.q;
        const uint32_t stride = by_16 ? kTokenBytes : kRowBytes;
        const uint32_t to_channels_32 = by_16 ? kRowBytes : chunk.k - chunk.q;
        const uint32_t to_part = by_16 ? kPartBytes : kPanelBytes;
        const uint32_t a_rows = x.rows_of_a(rows + row * kBlock * stride, stride);
        const uint32_t b_rows = x.rows_of_b(rows + column * kBlock * stride, stride);
        float of_part[kParts][2][4];  // NOTES: shorter chains of dependent products
        each<0, 8 * kParts>([&](int i) {
            const int step = i / kParts, part = i % kParts;
            const uint32_t further = step / 4 * to_channels_32 + part * to_part;
            const FloatFragment a((a_rows ^ step % 4 * 32) + further), b((b_rows ^ step % 4 * 32) + further);
            each<0, 2>([&](int n) { multiply_16(of_part[part][n], a, b, n, step > 0); });
        });
        each<0, 8>([&](int i) {
            c[i / 4][i % 4] = of_part[0][i / 4][i % 4];
            if constexpr (kParts > 1) c[i / 4][i % 4] += of_part[kParts - 1][i / 4][i % 4];
        });
    }

    // 16 x 16 scores into P.
    __device__ __forceinline__ void store_scores(int row, int column, const float (&c)[2][4],
                                                 float scale) const {
        auto pair = [&](int i) {
            return float2{scale * c[i / 2][i % 2 * 2], scale * c[i / 2][i % 2 * 2 + 1]};
        };
        if constexpr (kMirrors) return store_parts(row, column, {pair(0), pair(1), pair(2), pair(3)});
        T2 y[4];
        each<0, 4>([&](int i) { y[i] = from_float2<T2>(pair(i)); });
        const int lane = x.lane();
        move<T2>::stsm4(chunk.p + panel_offset(kBlock * row + lane % 16, 2 * column + lane / 16), y[0], y[1],
                        y[2], y[3]);
    }
};

}  // namespace tfla_tk::channel_gate
