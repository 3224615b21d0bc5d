// Steps 4 to 6: gradients within a chunk. A warp has a block of 16 tokens and 64 channels. With b from the
// block's begin in bits, b_16 at its end, dP and dL the gradients of the scores, Q = s q:
//   of readers i   dQ_i  = e^{b_i} (dQ_F_i e^{blocks before} + sum_j dP_ij k_j e^{-b_j}),  dk_read with dL
//   of writers j   dk_j  = e^{b_16 - b_j} (dK_G_j .. + sum_i (dP_ij Q_i + dL_ij k_i) e^{b_i - b_16})
// Blocks before come one after the other: what is there already takes the decay over the next one, whose
// operands are scaled to its end. So no factor exceeds 1. Pairs within the block take the same operands where
// the block is mild, else they go by levels (Level in matrices/scores.cuh).
#pragma once

#include "kda/gradients/config.cuh"
#include "kda/gradients/tiles.cuh"

namespace tfla_tk::kda {

// How far b may go in eight tokens of a block whose pairs take the operands of other blocks: these are as
// small as e^{b_16}, and what cancels them is as large.
constexpr float kOperandBits = 54.f;

// An accumulator of mma.sync: two rows, two neighbouring channels each.
struct Four {
    float x[4];

    __device__ inline Four() : x{} {}
    __device__ inline explicit Four(const float4& y) : x{y.x, y.y, y.z, y.w} {}
    __device__ inline Four(float2 upper, float2 lower) : x{upper.x, upper.y, lower.x, lower.y} {}
    __device__ inline operator float4() const { return {x[0], x[1], x[2], x[3]}; }
    // f(number, row, channel)
    template <class F> __device__ inline Four change(F f) const {
        Four y;
#pragma unroll
        for (int e = 0; e < 4; e++) y.x[e] = f(x[e], e / 2, e % 2);
        return y;
    }
    __device__ inline Four plus_channels(float2 y) const {
        return change([&](float x, int, int e) { return x + (e ? y.y : y.x); });
    }
    __device__ inline Four negative() const {
        return change([](float x, int, int) { return -x; });
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
__device__ inline Four operator+(const Four& a, const Four& b) {
    return a.change([&](float x, int r, int c) { return x + b.x[2 * r + c]; });
}
__device__ inline Four exp2_of(const Four& a) {
    return a.change([](float x, int, int) { return exp2f(x); });
}

// What a lane has of a block and 64 channels: dQ_F, dK_F, dK_G, to which the pairs of tokens are added.
struct GradientsOfBlock {
    Four queries[kTiles8], reads[kTiles8], writers[kTiles8];

    // NOTES: of accumulators of a wgmma, which lie in registers as those of mma.sync.
    template <class D>
    __device__ inline GradientsOfBlock(const D& q, const D& of_reads, const D& of_writers) {
        each<0, kTiles8>([&](int n) {
            auto take = [&](const D& from, float sign) {
                const auto& x = from.tiles[0][n / 2].data;
                const float2 upper = x[n % 2 * 2], lower = x[n % 2 * 2 + 1];
                return Four({sign * upper.x, sign * upper.y}, {sign * lower.x, sign * lower.y});
            };
            queries[n] = take(q, 1.f), reads[n] = take(of_reads, -1.f), writers[n] = take(of_writers, 1.f);
        });
    }
};

// Pairs of tokens of a block whose numbers differ in bit n as the highest one.
__device__ inline bool is_of_level(int i, int j, int n) { return (i ^ j) >= n && (i ^ j) < 2 * n; }
// The end of the left half of 2 n tokens.
__device__ inline int end_of_left(int token, int n) { return (token & ~(2 * n - 1)) | (n - 1); }

template <class T, int kDimK> struct Within {
    using T2 = typename base_types::packing<T>::packed_type;
    using Memory = GradientsMemory<T, kDimK>;
    using A = uint32_t[4];

    const GradientsGlobals& g;
    Memory& smem;
    const int part, block, lane;
    float query_factors[2], key_factors[2];  // of the lane's rows of results: s r and r, of l2norm

    __device__ inline Within(const GradientsGlobals& g, Memory& smem, int part, int block, int lane)
        : g(g), smem(smem), part(part), block(block), lane(lane) {
        each<0, 2>([&](int r) {
            query_factors[r] = query_factor(row_of_result(r));
            key_factors[r] = smem.factors.key_rstd[row_of_result(r)];
        });
    }

    // Step 4: operands of the block.
    __device__ inline void scale_operands() const {
        const auto& of = smem.factors;
        float of_query[2][2], of_key[2][2];  // factors of the lane's tokens
        each<0, 4>([&](int n) {
            const int token = token_of_operand(n / 2, n % 2);
            of_query[n / 2][n % 2] = query_factor(token), of_key[n / 2][n % 2] = of.key_rstd[token];
        });
#pragma unroll 1
        for (int tile = 0; tile < kTiles8; tile++) {
            const int channel = 8 * tile + lane / 4;
            const float end = smem.total[part][block][channel];
#pragma unroll
            for (int step = 0; step < 2; step++) {
                float of_keys[2], from_begin[2], of_queries[2];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int token = token_of_operand(step, n);
                    const float b = b_at(token, channel), up = exp2f(b);
                    const float k = of_key[step][n] * number_at(smem.keys, token, channel);
                    const float q = of_query[step][n] * number_at(smem.queries, token, channel);
                    of_keys[n] = rounded_to_tf32(k * exp2f(end - b));
                    from_begin[n] = rounded_to_tf32(k * up);
                    of_queries[n] = rounded_to_tf32(q * up);
                }
                auto leave = [&](OperandOfBlock which, const float (&x)[2]) {
                    smem.within.operands[part][block][which].of[step][tile][lane] = {x[0], x[1]};
                };
                leave(kKeysToEnd, of_keys), leave(kKeysFromBegin, from_begin);
                leave(kQueriesFromBegin, of_queries);
            }
        }
    }

    // Step 5: what the state and other blocks contribute. Before it <S, dS'> is complete: dK_G's part of it.
    __device__ inline void add_other_blocks(GradientsOfBlock& x) const {
        each<0, kTiles8>([&](int tile) {
            const Four bits = bits_to_end(tile, bits_of_results(tile)).plus_channels(later_bits(tile));
            leave_flow(tile, keys_of_results(tile) * x.writers[tile] * exp2_of(bits));
        });
#pragma unroll 1
        for (int of = 0; of < block; of++) {
            A scores[2], erasures[2];
            load_both<false>(scores, erasures, of);
            each<0, kTiles8>([&](int tile) {
                const float2 decay = decay_over(of, tile);
                x.queries[tile].scale_channels(decay), x.reads[tile].scale_channels(decay);
                each<0, 2>([&](int step) {
                    multiply(x.queries[tile], scores[step], operands(of, kKeysToEnd), step, tile);
                    multiply(x.reads[tile], erasures[step], operands(of, kKeysToEnd), step, tile);
                });
            });
        }
#pragma unroll 1
        for (int of = kBlocks - 1; of > block; of--) {
            A scores[2], erasures[2];
            load_both<true>(scores, erasures, of);
            each<0, kTiles8>([&](int tile) {
                x.writers[tile].scale_channels(decay_over(of, tile));
                add_readers(x.writers[tile], scores, erasures, of, tile);
            });
        }
    }

    // Step 6: pairs within the block. Behind it the operands of the block are no more. meet() waits for the
    // other warps.
    template <class Meet> __device__ inline void finish(GradientsOfBlock& x, Meet meet) const {
        const bool mild = is_mild();
        A scores[2], erasures[2], to_scores[2], to_erasures[2];
        if (mild) load_both<false>(scores, erasures, block), load_both<true>(to_scores, to_erasures, block);
        each<0, kTiles8>([&](int tile) {
            const Four b = bits_of_results(tile), to_end = bits_to_end(tile, b);
            const Four up = exp2_of(b), down = exp2_of(to_end);
            x.queries[tile] = x.queries[tile] * up, x.reads[tile] = x.reads[tile] * up;
            x.writers[tile] = x.writers[tile] * down;
            if (!mild) return;
            const auto& keys = operands(block, kKeysToEnd);
            Four by_queries, by_keys, of_writers;
            each<0, 2>([&](int step) {
                multiply(by_queries, scores[step], keys, step, tile);
                multiply(by_keys, erasures[step], keys, step, tile);
            });
            add_readers(of_writers, to_scores, to_erasures, block, tile);
            const Four from_end = exp2_of(to_end.negative()), from_begin = exp2_of(b.negative());
            x.queries[tile].add_product(by_queries, from_end);
            x.reads[tile].add_product(by_keys, from_end);
            x.writers[tile].add_product(of_writers, from_begin);
        });
        meet();
        if (!mild) leave_levels();
        each<0, kTiles8>([&](int tile) {
            auto leave = [&](int kind, const Four& sum) {
                float4& to = result(kind, tile);
                to = mild ? sum : sum + Four(to);
            };
            leave(0, x.queries[tile]), leave(1, x.reads[tile]), leave(2, x.writers[tile]);
        });
        sum_up();
    }

  private:
    __device__ inline float4& result(int kind, int tile) const {
        return smem.result(part, block, kind, tile, lane);
    }
    // dg's sums, then the pairs of a token with itself, which no gate is between; q dq and k dk of rows.
    // NOTES: a loop, through shared memory: unrolled it would not fit the instruction cache.
    __device__ inline void sum_up() const {
        float dots[2][2] = {};  // of q and k, per row
        const Four own = Four().change([&](float, int r, int) { return smem.within.own[row_of_result(r)]; });
#pragma unroll 1
        for (int tile = 0; tile < kTiles8; tile++) {
            const Four q = queries_of_results(tile), k = keys_of_results(tile);
            Four dq(result(0, tile)), dk(result(1, tile)), writers(result(2, tile));
            Four of_gates = q * dq;
            of_gates.add_product(k, dk), of_gates.add_product(k, writers.negative());
            dq.add_product(own, k), writers.add_product(own, q);
            dk = dk + writers;
#pragma unroll
            for (int e = 0; e < 4; e++)
                dots[0][e / 2] += q.x[e] * dq.x[e], dots[1][e / 2] += k.x[e] * dk.x[e];
            result(0, tile) = dq, result(1, tile) = dk, result(2, tile) = suffix_sums(tile, of_gates);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float sum = quad_sum(dots[n / 2][n % 2]);
            if (lane % 4 == 0) smem.row_dots[n / 2][part][block * kBlock + lane / 4 + n % 2 * 8] = sum;
        }
    }

    // --- numbers of a lane. As results it has rows lane / 4 and + 8 and two channels from `out` on.

    __device__ inline int token_of_operand(int step, int n) const {
        return block * kBlock + 8 * step + lane % 4 + 4 * n;
    }
    __device__ inline int row_of_result(int r) const { return block * kBlock + lane / 4 + 8 * r; }
    __device__ inline int out(int tile) const { return 8 * tile + lane % 4 * 2; }
    __device__ inline float b_at(int token, int channel) const {
        return kda::b_at(smem.gates[part], token, channel);
    }
    __device__ inline float2 totals(int of, int tile) const {
        return *reinterpret_cast<const float2*>(&smem.total[part][of][out(tile)]);
    }
    __device__ inline float2 decay_over(int of, int tile) const {
        const float2 bits = totals(of, tile);
        return {exp2f(bits.x), exp2f(bits.y)};
    }
    __device__ inline float2 later_bits(int tile) const {
        float2 sum{0.f, 0.f};
        for (int n = block + 1; n < kBlocks; n++) {
            const float2 x = totals(n, tile);
            sum.x += x.x, sum.y += x.y;
        }
        return sum;
    }
    __device__ inline Four bits_of_results(int tile) const {
        auto pair = [&](int r) {
            return *reinterpret_cast<const float2*>(
                &kda::b_at(smem.gates[part], row_of_result(r), out(tile)));
        };
        return {pair(0), pair(1)};
    }
    __device__ inline Four bits_to_end(int tile, const Four& b) const {
        return b.negative().plus_channels(totals(block, tile));
    }
    // Of q or k as they are.
    template <class Tile>
    __device__ inline const T* place_of(const Tile& tile, int token, int channel) const {
        const char* const bytes = reinterpret_cast<const char*>(&tile.data[part]);
        return reinterpret_cast<const T*>(bytes + panel_offset(token, channel / 8) + channel % 8 * sizeof(T));
    }
    template <class Tile> __device__ inline float number_at(const Tile& tile, int token, int channel) const {
        return static_cast<float>(*place_of(tile, token, channel));
    }
    template <class Tile>
    __device__ inline Four rows_of_results(const Tile& tile, const float (&factors)[2], int at) const {
        auto row = [&](int r) {
            const float2 x =
                to_float2(*reinterpret_cast<const T2*>(place_of(tile, row_of_result(r), out(at))));
            return float2{factors[r] * x.x, factors[r] * x.y};
        };
        return {row(0), row(1)};
    }
    // Normed; q also scaled.
    __device__ inline Four keys_of_results(int tile) const {
        return rows_of_results(smem.keys, key_factors, tile);
    }
    __device__ inline Four queries_of_results(int tile) const {
        return rows_of_results(smem.queries, query_factors, tile);
    }
    __device__ inline float query_factor(int token) const {
        return g.params.of.scale * smem.factors.query_rstd[token];
    }
    __device__ inline float key(int token, int channel) const {
        return smem.factors.key_rstd[token] * number_at(smem.keys, token, channel);
    }
    __device__ inline float query(int token, int channel) const {
        return query_factor(token) * number_at(smem.queries, token, channel);
    }
    __device__ inline bool is_mild() const {
        auto of = [&](const auto& x) { return *reinterpret_cast<const float2*>(&x[part][block][2 * lane]); };
        const float2 whole = of(smem.total), half = of(smem.middle);
        auto is = [](float x) { return fabsf(x) <= kOperandBits; };
        return __all_sync(0xffffffff,
                          is(half.x) && is(half.y) && is(whole.x - half.x) && is(whole.y - half.y));
    }

    // --- products

    // Operands A of a pair of blocks, of which `of` is the other one.
    template <bool kTransposed>
    __device__ inline void load_both(A (&scores)[2], A (&erasures)[2], int of) const {
        each<0, 2>([&](int step) {
            load_a<kTransposed>(scores[step], smem.within.d_scores, of, step);
            load_a<kTransposed>(erasures[step], smem.within.d_erasures, of, step);
        });
    }
    template <bool kTransposed>
    __device__ inline void load_a(A& a, const ScoreGradients& from, int of, int step) const {
        const int row = block * kBlock + lane / 4, column = of * kBlock + 8 * step + lane % 4;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = row + n % 2 * 8, j = column + n / 2 * 4;
            a[n] = __float_as_uint(kTransposed ? from[j][i] : from[i][j]);
        }
    }
    __device__ inline const BlockOperands& operands(int of, OperandOfBlock which) const {
        return smem.within.operands[part][of][which];
    }
    __device__ inline void multiply(Four& d, const A& a, const BlockOperands& b, int step, int tile) const {
        const float2 x = b.of[step][tile][lane];
        const uint32_t bits[2] = {__float_as_uint(x.x), __float_as_uint(x.y)};
        mma_tf32(d.x, a, bits);
    }
    // Adds what block `of` has read. The operands A are transposed.
    __device__ inline void add_readers(Four& writers, const A (&scores)[2], const A (&erasures)[2], int of,
                                       int tile) const {
        each<0, 2>([&](int step) {
            multiply(writers, scores[step], operands(of, kQueriesFromBegin), step, tile);
            multiply(writers, erasures[step], operands(of, kKeysFromBegin), step, tile);
        });
    }

    // --- levels

    // NOTES: a loop over channels, as in sum_up.
    __device__ inline void leave_levels() const {
#pragma unroll 1
        for (int tile = 0; tile < kTiles8; tile++) {
            Four sums[3];
#pragma unroll 1
            for (int n = kBlock / 2; n > 0; n /= 2) add_level(sums, tile, n);
            each<0, 3>([&](int kind) { result(kind, tile) = sums[kind]; });
        }
    }
    __device__ inline void add_level(Four (&sums)[3], int tile, int n) const {
        const int channel = 8 * tile + lane / 4;
        Four found[3];
        each<0, 2>([&](int step) {
            uint32_t keys[2], queries[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = 8 * step + lane % 4 + 4 * i, first = block * kBlock;
                const float to_end =
                    b_at(first + token, channel) - b_at(first + end_of_left(token, n), channel);
                const float factor = exp2f(-fabsf(to_end));
                keys[i] = __float_as_uint(rounded_to_tf32(factor * key(first + token, channel)));
                queries[i] = __float_as_uint(rounded_to_tf32(factor * query(first + token, channel)));
            }
            auto add = [&](Four& d, const ScoreGradients& from, auto transposed, const uint32_t (&b)[2]) {
                A a;
                load_a<transposed.value>(a, from, block, step);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!is_of_level(lane / 4 + e % 2 * 8, 8 * step + lane % 4 + e / 2 * 4, n)) a[e] = 0;
                mma_tf32(d.x, a, b);
            };
            const auto& within = smem.within;
            add(found[0], within.d_scores, std::false_type{}, keys);
            add(found[1], within.d_erasures, std::false_type{}, keys);
            add(found[2], within.d_scores, std::true_type{}, queries);
            add(found[2], within.d_erasures, std::true_type{}, keys);
        });
        const Four factor = bits_of_results(tile).change([&](float x, int r, int e) {
            const int end = block * kBlock + end_of_left(lane / 4 + 8 * r, n);
            return exp2f(-fabsf(x - b_at(end, out(tile) + e)));
        });
        each<0, 3>([&](int kind) { sums[kind].add_product(found[kind], factor); });
    }

    // --- sums over tokens

    // Over the later tokens of the block, and the token itself; the block's sum for the others.
    __device__ inline Four suffix_sums(int tile, Four x) const {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float later = __shfl_down_sync(0xffffffff, x.x[e], step);
                if (lane + step < 32) x.x[e] += later;
            }
#pragma unroll
        for (int e = 0; e < 2; e++) x.x[e] += __shfl_sync(0xffffffff, x.x[2 + e], lane % 4);
        if (lane < 4) write_pair(smem.block_sums[block], part * kPart + out(tile), {x.x[0], x.x[1]});
        return x;
    }
    __device__ inline void leave_flow(int tile, const Four& x) const {
        const float2 sum{sum_of_rows(x.x[0] + x.x[2]), sum_of_rows(x.x[1] + x.x[3])};
        if (lane < 4) write_pair(smem.block_flow[block], part * kPart + out(tile), sum);
    }
};

}  // namespace tfla_tk::kda
