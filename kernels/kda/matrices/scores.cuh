// Scores of a chunk for any gates: sums over channels of q_ic k_jc e^{b_ic - b_jc}, and of k_ic k_jc alike.
//
// A warp has blocks of 16 x 16 pairs. It makes the operands in the registers in which mma.sync takes them, in
// tf32: a lane has rows lane / 4 and + 8 and, of eight channels, 2 (lane % 4) and the next one, which are k =
// lane % 4 and + 4 to it: k may be counted in any order, in both operands.
#pragma once

#include "kda/matrices/gates.cuh"

namespace tfla_tk::kda {

// mma.sync drops the last bits of an operand in fp32. Times 2^kMeanBits the loss is zero in the mean, and
// numbers of bf16 are still exact.
constexpr float kMeanBits = 0.72f / 2048 * kLog2e;

__device__ inline float2 exp2_of(float2 x) { return {exp2f(x.x), exp2f(x.y)}; }
__device__ inline float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ inline float2 plus(float2 x, float y) { return {x.x + y, x.y + y}; }
__device__ inline float2 plus(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
__device__ inline float2 minus(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }

// Of eight channels: a lane's two rows.
struct Rows {
    float2 of[2];
    __device__ inline Rows by(const Rows& x) const { return {times(of[0], x.of[0]), times(of[1], x.of[1])}; }
};

// Scores of 16 x 16 pairs: two times eight columns.
struct Pairs {
    float of_queries[2][4], of_keys[2][4];
    __device__ inline void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++) of_queries[i / 4][i % 4] = of_keys[i / 4][i % 4] = 0.f;
    }
    __device__ inline void add(const Rows& queries, const Rows& keys, const Rows& writers) {
        multiply(of_queries, queries, writers);
        multiply(of_keys, keys, writers);
    }

  private:
    __device__ static inline void multiply(float (&d)[2][4], const Rows& a, const Rows& b) {
        const uint32_t x[4] = {__float_as_uint(a.of[0].x), __float_as_uint(a.of[1].x),
                               __float_as_uint(a.of[0].y), __float_as_uint(a.of[1].y)};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint32_t y[2] = {__float_as_uint(b.of[n].x), __float_as_uint(b.of[n].y)};
            mma_tf32(d[n], x, y);
        }
    }
};

// A block of 16 tokens and 64 channels, as a lane takes it for the scores. NOTES: a place is computed once
// for all channels: 16 channels further a tile's is place ^ 32, and eight channels further that of b.
template <class T, int kDimK> struct BlockOfRows {
    using T2 = typename base_types::packing<T>::packed_type;
    MatricesMemory<T, kDimK>& smem;
    int block, lane;
    uint32_t queries, keys, b;  // places

    __device__ inline BlockOfRows(MatricesMemory<T, kDimK>& smem, int block, int lane)
        : smem(smem), block(block), lane(lane) {
        const uint32_t rows = panel_offset(block * kBlock + lane % 16, lane / 16);
        queries = shared_address(&smem.in.queries) + rows, keys = shared_address(&smem.in.keys) + rows;
        const int row = block * kBlock + lane / 4;
        b = shared_address(&smem.in.gates[row]) + 8 * (lane % 4) + 32 * (row % 4);
    }

    // visit(n, q, k, b) of every eight channels, the n-th ones.
    template <int kUnrolled, class Visit> __device__ inline void for_channels(Visit visit) const {
#pragma unroll kUnrolled
        for (int step = 0; step < kPart / 16; step++) {
            T2 q[4], k[4];
            move<T2>::ldsm4(q[0], q[1], q[2], q[3], queries ^ 32 * step);
            move<T2>::ldsm4(k[0], k[1], k[2], k[3], keys ^ 32 * step);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int n = 2 * step + i;
                const uint32_t at = b ^ 32 * n;
                visit(n, eight(q, i), eight(k, i),
                      Rows{{load_pair(at), load_pair(at + 8 * kPart * sizeof(float))}});
            }
        }
    }
    // The lane's two of eight channels.
    __device__ inline float2 of_channels(const float (&x)[kPart], int n) const {
        return load_pair(shared_address(&x[8 * n + lane % 4 * 2]));
    }

  private:
    __device__ static inline Rows eight(const T2 (&x)[4], int i) {
        return {{to_float2(x[2 * i]), to_float2(x[2 * i + 1])}};
    }
};

// Step 2: of a mild block its own scores, with both factors around its middle; and of all but the last block
// what later ones read.
template <class T, int kDimK>
__device__ inline void score_block(const BlockOfRows<T, kDimK>& rows, Pairs& pairs, bool mild) {
    auto& smem = rows.smem;
    rows.template for_channels<2>([&](int n, const Rows& q, const Rows& k, const Rows& b) {
        if (mild) {
            const float2 middle = rows.of_channels(smem.middle[rows.block], n);
            Rows up, down;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                up.of[r] = exp2_of(minus(b.of[r], plus(middle, -kMeanBits)));
                down.of[r] = exp2_of(minus(plus(middle, kMeanBits), b.of[r]));
            }
            pairs.add(q.by(up), k.by(up), k.by(down));
        }
        if (rows.block < kBlocks - 1) {
            const float2 total = plus(rows.of_channels(smem.total[rows.block], n), kMeanBits);
            const Rows w = k.by({{exp2_of(minus(total, b.of[0])), exp2_of(minus(total, b.of[1]))}});
            smem.writers[rows.block][n][rows.lane] = {w.of[0].x, w.of[0].y, w.of[1].x, w.of[1].y};
        }
    });
}

// A level of a block: pairs of tokens i > j whose numbers differ in bit n as the highest one. Between them
// lies the end of the left half of 2 n tokens, and e^{b_i - b_j} is a product of two factors from there, none
// of which exceeds 1. Level 0 has the pairs i = i, which meet no gate.
struct Level {
    int n, row, column;
    int last;  // that end, for row `row` where it is below 8, as a row of eight; the other row's is 8 further

    __device__ inline Level(int n, int lane)
        : n(n),
          row(lane / 4),
          column(lane % 4 * 2),
          last((n == 8 ? 7 : (row & ~(2 * n - 1)) | (n - 1)) & 7) {}

    // Factors of the r-th row: e^{-|b - b at the end|}.
    __device__ inline float2 factor(const Rows& b, int r, int lane) const {
        if (n == 0) return {1.f, 1.f};
        const float2 of{n == 8 ? b.of[0].x : b.of[r].x, n == 8 ? b.of[0].y : b.of[r].y};
        const int source = 4 * last + lane % 4;
        const float2 end{__shfl_sync(0xffffffff, of.x, source), __shfl_sync(0xffffffff, of.y, source)};
        const float2 d = minus(b.of[r], end);
        return exp2_of({kMeanBits - fabsf(d.x), kMeanBits - fabsf(d.y)});
    }
    // Whether the r-th row is read at this level, or writes.
    __device__ inline bool reads(int r) const { return n == 0 || is_right(r); }
    __device__ inline bool writes(int r) const { return n == 0 || !is_right(r); }
    // Adds the level's own pairs.
    __device__ inline void add_to(Pairs& all, const Pairs& of_level) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = row + e / 2 * 8, j = column + e % 2 + half * 8, differ = i ^ j;
                if (n == 0 ? differ != 0 : i < j || differ < n || differ >= 2 * n) continue;
                all.of_queries[half][e] += of_level.of_queries[half][e];
                all.of_keys[half][e] += of_level.of_keys[half][e];
            }
    }

  private:
    __device__ inline bool is_right(int r) const { return n == 8 ? r == 1 : (row & n) != 0; }
};

// Step 2 of a block that is not mild.
template <class T, int kDimK>
__device__ inline void score_levels(const BlockOfRows<T, kDimK>& rows, Pairs& pairs) {
#pragma unroll 1
    for (int n = kBlock / 2; n >= 0; n = n == 0 ? -1 : n / 2) {
        const Level level(n, rows.lane);
        Pairs of_level;
        of_level.clear();
        rows.template for_channels<1>([&](int, const Rows& q, const Rows& k, const Rows& b) {
            Rows queries, keys, writers;
            const float2 zero{0.f, 0.f};
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 e = level.factor(b, r, rows.lane);
                const float2 read = level.reads(r) ? e : zero, write = level.writes(r) ? e : zero;
                queries.of[r] = times(q.of[r], read), keys.of[r] = times(k.of[r], read);
                writers.of[r] = times(k.of[r], write);
            }
            of_level.add(queries, keys, writers);
        });
        level.add_to(pairs, of_level);
    }
}

// Step 3: scores with kCount blocks left of the block's own, block `last` and those before it, times the
// decay over the blocks between, of which there are kBetween behind `last`.
template <int kCount, int kBetween, class T, int kDimK>
__device__ inline void score_below(const BlockOfRows<T, kDimK>& rows, Pairs (&pairs)[2], int last) {
    const auto& smem = rows.smem;
    rows.template for_channels<2>([&](int n, const Rows& q, const Rows& k, const Rows& b) {
        const Rows f{{exp2_of(plus(b.of[0], kMeanBits)), exp2_of(plus(b.of[1], kMeanBits))}};
        const Rows queries = q.by(f), keys = k.by(f);
        float2 between{0.f, 0.f};
#pragma unroll
        for (int m = 1; m <= kBetween; m++)
            between = plus(between, rows.of_channels(smem.total[last + m], n));
#pragma unroll
        for (int c = 0; c < kCount; c++) {
            const float4 w = smem.writers[last - c][n][rows.lane];
            Rows writers{{{w.x, w.y}, {w.z, w.w}}};
            if (kBetween + c > 0) {
                const float2 e = exp2_of(between);
                writers = writers.by({{e, e}});
            }
            pairs[c].add(queries, keys, writers);
            if (c + 1 < kCount) between = plus(between, rows.of_channels(smem.total[last - c], n));
        }
    });
}

}  // namespace tfla_tk::kda
