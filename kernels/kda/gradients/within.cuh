// Step 5: gradients within a chunk. A warp has a block of 16 tokens and 64 channels, eight at a time. With b
// from the block's begin in bits, dP and dL the gradients of the scores, Q = s q:
//   of readers i   dQ_i  = e^{b_i} (dQ_F_i e^{blocks before} + sum_j dP_ij k_j e^{-b_j}),  dk_read with dL
//   of writers j   dk_j  = e^{-b_j} (dK_G_j .. + sum_i (dP_ij Q_i + dL_ij k_i) e^{b_i})
// Blocks before come one after the other: what is there already takes the decay over the next one, by which
// the operands of that one are scaled to its end. So no factor exceeds 1. Pairs within the block: around its
// middle where it is mild, else by levels (scores.cuh). mma.sync takes operands in tf32: A the gradients of
// the scores, B channels of q or k times their factors, a lane's numbers of rows lane % 4 and + 4, column
// lane / 4.
#pragma once

#include "kda/gradients/config.cuh"
#include "kda/gradients/tiles.cuh"

namespace tfla_tk::kda {

// An accumulator of mma.sync: two rows, two neighbouring channels each.
struct Four {
    float x[4];

    __device__ inline Four() : x{} {}
    __device__ inline explicit Four(const float4& y) : x{y.x, y.y, y.z, y.w} {}
    __device__ inline operator float4() const { return {x[0], x[1], x[2], x[3]}; }
    // f(number, row, channel)
    template <class F> __device__ inline Four change(F f) const {
        Four y;
#pragma unroll
        for (int e = 0; e < 4; e++) y.x[e] = f(x[e], e / 2, e % 2);
        return y;
    }
    __device__ inline void scale_channels(float2 by) {
        x[0] *= by.x, x[1] *= by.y, x[2] *= by.x, x[3] *= by.y;
    }
    __device__ inline void add_product(const Four& a, const Four& b) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = fmaf(a.x[e], b.x[e], x[e]);
    }
};
__device__ inline Four operator*(const Four& a, const Four& b) {
    return a.change([&](float x, int r, int c) { return x * b.x[2 * r + c]; });
}
__device__ inline Four exp2_of(const Four& a) {
    return a.change([](float x, int, int) { return exp2f(x); });
}

// Pairs of tokens of a block whose numbers differ in bit n as the highest one; see Level in scores.cuh.
__device__ inline bool is_of_level(int i, int j, int n) { return (i ^ j) >= n && (i ^ j) < 2 * n; }
// The end of the left half of 2 n tokens.
__device__ inline int end_of_left(int token, int n) { return (token & ~(2 * n - 1)) | (n - 1); }

template <class T, int kDimK> struct Within {
    using T2 = typename base_types::packing<T>::packed_type;
    using Memory = GradientsMemory<T, kDimK>;
    // The operands B of eight tokens: two numbers of a lane.
    using Eight = uint32_t[2];

    const GradientsGlobals& g;
    Memory& smem;
    const int part, block, lane;
    const bool mild;

    // Eight channels: what a lane has as results, of rows lane / 4 and + 8, channels `out` and the next one;
    // as operands it has channel `in`.
    struct Channels {
        int tile, out, in;
        __device__ inline Channels(int tile, int lane)
            : tile(tile), out(8 * tile + lane % 4 * 2), in(8 * tile + lane / 4) {}
    };

    __device__ inline void run() {
        float dots[2][2] = {};  // of q and k, per row
#pragma unroll 1
        for (int tile = 0; tile < kTiles8; tile++) make(Channels(tile, lane), dots);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float sum = quad_sum(dots[n / 2][n % 2]);
            if (lane % 4 == 0) smem.row_dots[n / 2][part][block * kBlock + lane / 4 + n % 2 * 8] = sum;
        }
    }

  private:
    __device__ inline void make(const Channels& c, float (&dots)[2][2]) {
        auto& slots = smem.within.of_tiles[part][block][c.tile];
        Four dq(slots[0][lane]), reads(slots[1][lane]), writers(slots[2][lane]);
        const Four b = bits_of_results(c), to_end = bits_to_end(c, b);
        const Four k = results_of(smem.keys, smem.key_norms, 1.f, c);
        const Four q = results_of(smem.queries, smem.query_norms, g.params.of.scale, c);
        leave_flow(c, k * writers * exp2_of(to_end.change([&](float x, int, int e) {
                          const float2 later = later_bits(c);
                          return x + (e ? later.y : later.x);
                      })));
        add_blocks_before(c, dq, reads);
        add_blocks_behind(c, writers);
        const Four up = exp2_of(b), down = exp2_of(to_end);
        dq = dq * up, reads = reads * up, writers = writers * down;
        if (mild)
            add_mild(c, dq, reads, writers, b);
        else
            add_levels(c, dq, reads, writers, b);
        Four of_gates = q * dq;
        of_gates.add_product(k, reads);
        of_gates =
            of_gates.change([&](float x, int r, int e) { return x - k.x[2 * r + e] * writers.x[2 * r + e]; });
        add_own(dq, writers, q, k);
        const Four dk = reads.change([&](float x, int r, int e) { return x + writers.x[2 * r + e]; });
#pragma unroll
        for (int e = 0; e < 4; e++) dots[0][e / 2] += q.x[e] * dq.x[e], dots[1][e / 2] += k.x[e] * dk.x[e];
        slots[0][lane] = suffix_sums(c, of_gates), slots[1][lane] = dq, slots[2][lane] = dk;
    }

    // --- numbers of a lane

    __device__ inline int row_of_result(int r) const { return block * kBlock + lane / 4 + 8 * r; }
    __device__ inline float b_at(int token, int channel) const {
        return kda::b_at(smem.gates[part], token, channel);
    }
    __device__ inline float total(int of_block, int channel) const {
        return smem.total[part][of_block][channel];
    }
    __device__ inline float2 totals(int of_block, const Channels& c) const {
        return *reinterpret_cast<const float2*>(&smem.total[part][of_block][c.out]);
    }
    __device__ inline float2 later_bits(const Channels& c) const {
        float2 sum{0.f, 0.f};
        for (int n = block + 1; n < kBlocks; n++) {
            const float2 x = totals(n, c);
            sum.x += x.x, sum.y += x.y;
        }
        return sum;
    }
    __device__ inline Four bits_of_results(const Channels& c) const {
        return Four().change([&](float, int r, int e) { return b_at(row_of_result(r), c.out + e); });
    }
    __device__ inline Four bits_to_end(const Channels& c, const Four& b) const {
        const float2 end = totals(block, c);
        return b.change([&](float x, int, int e) { return (e ? end.y : end.x) - x; });
    }
    template <class Tile>
    __device__ static inline T number_at(const Tile& tile, int panel, int token, int channel) {
        const char* const bytes = reinterpret_cast<const char*>(&tile.data[panel]);
        return *reinterpret_cast<const T*>(bytes + panel_offset(token, channel / 8) +
                                           channel % 8 * sizeof(T));
    }
    template <class Tile>
    __device__ inline Four results_of(const Tile& tile, const float (&norms)[kChunk], float scale,
                                      const Channels& c) const {
        return Four().change([&](float, int r, int e) {
            const int token = row_of_result(r);
            return scale * norms[token] * to_float(number_at(tile, part, token, c.out + e));
        });
    }
    // Of k, or of s q, one number; in fp32.
    __device__ inline float key(int token, int channel) const {
        return smem.key_norms[token] * to_float(number_at(smem.keys, part, token, channel));
    }
    __device__ inline float query(int token, int channel) const {
        return g.params.of.scale * smem.query_norms[token] *
               to_float(number_at(smem.queries, part, token, channel));
    }
    __device__ static inline float to_float(T x) { return static_cast<float>(x); }

    // --- products. Of blocks `rows` and `columns` of the gradients of scores, eight columns from 8 step on.

    using A = uint32_t[4];
    template <bool kTransposed>
    __device__ inline void load_a(A& a, const ScoreGradients& from, int rows, int columns, int step) const {
        const int row = rows * kBlock + lane / 4, column = columns * kBlock + 8 * step + lane % 4;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row + n % 2 * 8, j = column + n / 2 * 4;
            a[n] = __float_as_uint(kTransposed ? from[j][i] : from[i][j]);
        }
    }
    __device__ inline void keep_level(A& a, int step, int n) const {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!is_of_level(lane / 4 + e % 2 * 8, 8 * step + lane % 4 + e / 2 * 4, n)) a[e] = 0;
    }
    // make(token of the block) gives a number of B.
    template <class Make> __device__ inline void make_b(Eight& b, int step, Make make) const {
#pragma unroll
        for (int n = 0; n < 2; n++)
            b[n] = __float_as_uint(rounded_to_tf32(make(8 * step + lane % 4 + 4 * n)));
    }
    // Scaled by e^{bits of a token}.
    template <class Bits>
    __device__ inline void make_keys(Eight& b, int of_block, int step, const Channels& c, Bits bits) const {
        make_b(b, step, [&](int t) { return key(of_block * kBlock + t, c.in) * exp2f(bits(t)); });
    }
    template <class Bits>
    __device__ inline void make_queries(Eight& b, int of_block, int step, const Channels& c,
                                        Bits bits) const {
        make_b(b, step, [&](int t) { return query(of_block * kBlock + t, c.in) * exp2f(bits(t)); });
    }
    // Adds what block `of` has written. level: 0: of all pairs.
    template <class Bits>
    __device__ inline void add_written(Four& dq, Four& reads, int of, const Channels& c, Bits bits,
                                       int level = 0) const {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            Eight keys;
            make_keys(keys, of, step, c, bits);
            A a;
            load_a<false>(a, smem.within.d_scores, block, of, step);
            if (level) keep_level(a, step, level);
            mma_tf32(dq.x, a, keys);
            load_a<false>(a, smem.within.d_erasures, block, of, step);
            if (level) keep_level(a, step, level);
            mma_tf32(reads.x, a, keys);
        }
    }
    // Adds what block `of` has read.
    template <class Bits>
    __device__ inline void add_read(Four& writers, int of, const Channels& c, Bits bits,
                                    int level = 0) const {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            Eight x;
            A a;
            make_queries(x, of, step, c, bits);
            load_a<true>(a, smem.within.d_scores, block, of, step);
            if (level) keep_level(a, step, level);
            mma_tf32(writers.x, a, x);
            make_keys(x, of, step, c, bits);
            load_a<true>(a, smem.within.d_erasures, block, of, step);
            if (level) keep_level(a, step, level);
            mma_tf32(writers.x, a, x);
        }
    }

    __device__ inline void add_blocks_before(const Channels& c, Four& dq, Four& reads) const {
#pragma unroll 1
        for (int of = 0; of < block; of++) {
            const float2 bits = totals(of, c), decay{exp2f(bits.x), exp2f(bits.y)};
            dq.scale_channels(decay), reads.scale_channels(decay);
            const float end = total(of, c.in);
            add_written(dq, reads, of, c, [&](int t) { return end - b_at(of * kBlock + t, c.in); });
        }
    }
    __device__ inline void add_blocks_behind(const Channels& c, Four& writers) const {
#pragma unroll 1
        for (int of = kBlocks - 1; of > block; of--) {
            const float2 bits = totals(of, c);
            writers.scale_channels({exp2f(bits.x), exp2f(bits.y)});
            add_read(writers, of, c, [&](int t) { return b_at(of * kBlock + t, c.in); });
        }
    }
    __device__ inline void add_mild(const Channels& c, Four& dq, Four& reads, Four& writers,
                                    const Four& b) const {
        const float middle = smem.middle[part][block][c.in];
        const float2 of_results = *reinterpret_cast<const float2*>(&smem.middle[part][block][c.out]);
        const Four from_middle =
            b.change([&](float x, int, int e) { return x - (e ? of_results.y : of_results.x); });
        const Four up = exp2_of(from_middle);
        const Four down = exp2_of(from_middle.change([](float x, int, int) { return -x; }));
        auto bits = [&](int t) { return b_at(block * kBlock + t, c.in) - middle; };
        Four by_queries, by_keys, of_writers;
        add_written(by_queries, by_keys, block, c, [&](int t) { return -bits(t); });
        add_read(of_writers, block, c, bits);
        dq.add_product(by_queries, up), reads.add_product(by_keys, up), writers.add_product(of_writers, down);
    }
    __device__ inline void add_levels(const Channels& c, Four& dq, Four& reads, Four& writers,
                                      const Four& b) const {
#pragma unroll 1
        for (int n = kBlock / 2; n > 0; n /= 2) {
            auto bits = [&](int t) {
                return -fabsf(b_at(block * kBlock + t, c.in) -
                              b_at(block * kBlock + end_of_left(t, n), c.in));
            };
            Four by_queries, by_keys, of_writers;
            add_written(by_queries, by_keys, block, c, bits, n);
            add_read(of_writers, block, c, bits, n);
            const Four factor = b.change([&](float x, int r, int e) {
                const int end = end_of_left(lane / 4 + 8 * r, n);
                return exp2f(-fabsf(x - b_at(block * kBlock + end, c.out + e)));
            });
            dq.add_product(by_queries, factor), reads.add_product(by_keys, factor);
            writers.add_product(of_writers, factor);
        }
    }
    // Of a token with itself: no gate is between them.
    __device__ inline void add_own(Four& dq, Four& writers, const Four& q, const Four& k) const {
        const Four own = Four().change([&](float, int r, int) { return smem.within.own[row_of_result(r)]; });
        dq.add_product(own, k), writers.add_product(own, q);
    }

    // --- sums over tokens

    // Over the later tokens of the block, and the token itself; the block's sum for the others.
    __device__ inline Four suffix_sums(const Channels& c, Four x) const {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float later = __shfl_down_sync(0xffffffff, x.x[e], step);
                if (lane + step < 32) x.x[e] += later;
            }
#pragma unroll
        for (int e = 0; e < 2; e++) x.x[e] += __shfl_sync(0xffffffff, x.x[2 + e], lane % 4);
        if (lane < 4) write_pair(smem.block_sums[block], part * kPart + c.out, {x.x[0], x.x[1]});
        return x;
    }
    __device__ inline void leave_flow(const Channels& c, const Four& x) const {
        const float2 sum{sum_of_rows(x.x[0] + x.x[2]), sum_of_rows(x.x[1] + x.x[3])};
        if (lane < 4) write_pair(smem.block_flow[block], part * kPart + c.out, sum);
    }
};

}  // namespace tfla_tk::kda
