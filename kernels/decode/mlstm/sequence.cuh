// 2 to 16 tokens of mLSTM as one chunk: h_t = s (inter_t q_t C + sum_j weight_tj (q_t k_j) v_j) /
// normaliser, C' = decay C + sum_j write_j k_j v_j^T. Each element of the state is read once and written
// once, by the same thread.
//
// A CTA has all rows of a slice of V of one head. `across` of its warps are side by side in the columns, the
// others take further blocks of eight rows. MMAs have 16 columns of C as M and tokens as N: then C^T as the A
// operand of C^T q^T and the result of v^T k have the same elements in each thread. Which 16 columns of C
// form an MMA is free, so they are chosen to give a thread kWidth neighbouring columns, 8 or 16 bytes.
//
// The scores q_t k_j, the normaliser and h's last sum are small; every slice of a head computes its own.
#pragma once

#include "common/cluster.cuh"
#include "common/kernel.cuh"
#include "decode/mlstm/sequence_gates.cuh"
#include "decode/mlstm/sequence_products.cuh"
#include "decode/numbers.cuh"

namespace tfla_tk::decode {

constexpr int kSequenceThreads = 256;
constexpr int kSequenceWarps = kSequenceThreads / 32;
constexpr int kSequenceCtas = 2;  // per multiprocessor; limited by 128 registers per thread
constexpr int kBlock = 8;         // rows of C per MMA, of which a thread has two
constexpr int kPair = 2;
constexpr int kSequenceColumns = 128;  // of a slice at most
static_assert(kMlstmKeys <= kSequenceThreads);

// Before, After: types of C. kTokens: 8 or 16. kTokensFp32: q, k, v are fp32, otherwise 16-bit. kVector: a
// thread's columns are neighbours and move as one word.
template <class Before_, class After_, int kTokens_, bool kTokensFp32_, bool kVector_> struct SequenceConfig {
    using Before = Before_;
    using After = After_;
    using Word = std::conditional_t<kTokensFp32_, float, unsigned short>;  // of q, k, v in memory
    static constexpr int kTokens = kTokens_;
    static constexpr bool kTokensFp32 = kTokensFp32_, kVector = kVector_;
    static constexpr bool kStateFp32 = sizeof(Before) == 4;
    // columns of a thread: low parts of v, or more than 8 tokens, leave no registers for eight
    static constexpr int kWidest = 16 / (sizeof(Before) > sizeof(After) ? sizeof(Before) : sizeof(After));
    static constexpr int kWidth = kVector && !kTokensFp32 && kTokens == 8 ? kWidest : 4;
    static constexpr int kWarpColumns = 8 * kWidth;
    static constexpr int kTiles = kTokens / 8;              // of 8 tokens
    static constexpr int kProducts = kWidth / 2;            // of 16 columns
    static constexpr int kParts = kSequenceWarps / kTiles;  // of K, in the scores
    // blocks of a thread in flight: 128 or 96 bytes, limited by registers; two where a word holds one number
    static constexpr int kInFlight = kVector ? (kTokens == 8 ? 64 : 48) / (kWidth * sizeof(Before)) : 2;
};

// A thread's columns of a row of C.
template <class T, int kWidth, bool kVector> struct RowPart {
    Columns<T, kVector ? kWidth : 1> words[kVector ? 1 : kWidth];

    // left: columns from the thread's first one to the end of the row; 0 where there is no such row.
    __device__ inline void load(const T* from, int left) {
        if constexpr (kVector) {
            if (left > 0) words[0].load(from);
        } else {
#pragma unroll
            for (int n = 0; n < kWidth; n++)
                if (8 * n < left) words[n].load(from + 8 * n);
        }
    }
    __device__ inline void store(T* to, int left) const {
        if constexpr (kVector) {
            if (left > 0) words[0].store(to);
        } else {
#pragma unroll
            for (int n = 0; n < kWidth; n++)
                if (8 * n < left) words[n].store(to + 8 * n);
        }
    }
    __device__ inline float operator[](int n) const {
        return kVector ? words[0][n] : words[kVector ? 0 : n][0];
    }
    __device__ inline void set(int n, float x) { words[kVector ? 0 : n].set(kVector ? n : 0, x); }
};

// NOTES: rows are padded by 8 words against bank conflicts.
template <int kTokens> struct SequenceTokens {
    float query[kTokens][kMlstmKeys + 8];
    float key[kTokens][kMlstmKeys + 8];
    float value[kTokens][kSequenceColumns + 8];  // of the slice's columns
};

template <class C> struct SequenceShared {
    static constexpr int kRowPad = 4;  // words behind a row of `sums`
    union {
        SequenceTokens<C::kTokens> tokens;
        // partial sums of h of the warps that split the rows; written when the tokens are no longer read
        float sums[C::kTokens * kSequenceWarps * (C::kWarpColumns + kRowPad)];
    };
    // q_t k_j per slice of K; then in [0] the weight of v_j in h_t
    float scores[C::kParts][C::kTokens][C::kTokens];
    float n[kMlstmKeys];  // before, then after the tokens
    float query_n[C::kTokens];
    float divisor[C::kTokens];
    SequenceGates<C::kTokens> gates;
};

// The position of a thread in C.
template <class C> struct SequencePlace {
    int index;                  // of the head in all heads
    int first_column, columns;  // of the slice
    int log2_columns;
    int row_warp, row_warps;  // this warp's index among those that split the rows, and their number
    int position;             // of the thread's first column in the slice's order in shared memory
    int g, t;                 // lane 4 g + t

    __device__ inline SequencePlace(const MlstmParams& p) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, log2_warps = log2_of(p.tiling.across);
        index = blockIdx.y + blockIdx.z * p.heads;
        columns = C::kWarpColumns << log2_warps;
        log2_columns = log2_of(C::kWarpColumns) + log2_warps;
        first_column = blockIdx.x * columns;
        row_warp = warp >> log2_warps;
        row_warps = kSequenceWarps >> log2_warps;
        g = lane / 4;
        t = lane % 4;
        position = (warp & (p.tiling.across - 1)) * C::kWarpColumns + g * C::kWidth;
    }

    // The column of V at a position of the slice.
    __device__ inline int column(int position) const {
        if constexpr (C::kVector) return first_column + position;
        const int own = position % C::kWarpColumns;
        return first_column + position - own + own % C::kWidth * 8 + own / C::kWidth;
    }
};

template <bool kTokensFp32, class Word> __device__ inline float widened_word(Word word, DType dtype) {
    if constexpr (kTokensFp32)
        return word;
    else {
        const float half = __half2float(__ushort_as_half(word));
        return dtype == DType::float16 ? half : __uint_as_float(static_cast<unsigned>(word) << 16);
    }
}

// Loads the tokens, their gates, n and m; all loads are issued before the first is waited for.
template <class C>
__device__ inline void load_tokens(SequenceShared<C>& shared, const MlstmParams& g,
                                   const SequencePlace<C>& at) {
    using Word = typename C::Word;
    constexpr int kValues = C::kTokens * kSequenceColumns / kSequenceThreads;
    const std::int64_t batch = blockIdx.z, head = blockIdx.y;
    const auto rows_of = [&](const MlstmRows& x) {
        return static_cast<const Word*>(x.data) + batch * x.batch_stride + head * x.head_stride;
    };
    const int key = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool has_key = key < g.dim_k, has_m = !g.sigmoid_gate, has_token = lane < g.tokens;
    const MlstmState& state = g.before;
    const int some_token = has_token ? lane : 0;
    const Number i = gate_of(g.i, batch, head, some_token), f = gate_of(g.f, batch, head, some_token);
    const Number m(has_m ? state.m : state.n, has_m ? state.m_dtype : state.n_dtype, has_m ? at.index : 0);
    const Number n(state.n, state.n_dtype,
                   static_cast<std::int64_t>(at.index) * g.dim_k + (has_key ? key : 0));

    Word queries[C::kTokens], keys[C::kTokens], values[kValues];
    const Word* query = rows_of(g.q) + key * g.q.column_stride;
    const Word* from_key = rows_of(g.k) + key * g.k.column_stride;
#pragma unroll
    for (int token = 0; token < C::kTokens; token++) {
        const bool exists = has_key && token < g.tokens;
        queries[token] = exists ? *query : Word{};
        keys[token] = exists ? *from_key : Word{};
        query += g.q.token_stride;
        from_key += g.k.token_stride;
    }
    const Word* value = rows_of(g.v);
    const auto place_of = [&](int n) {  // token, position
        const int number = threadIdx.x + n * kSequenceThreads;
        return int2{number >> at.log2_columns, number & (at.columns - 1)};
    };
#pragma unroll
    for (int n = 0; n < kValues; n++) {
        const auto [token, position] = place_of(n);
        const int column = at.column(position);
        const bool exists = token < g.tokens && column < g.dim_v;
        values[n] = exists ? value[token * g.v.token_stride + column * g.v.column_stride] : Word{};
    }

    if (warp == 0) scan_gates(shared.gates, g, has_token ? i : kNoInput, has_token ? f : kNoForget, m);
    shared.n[key] = has_key ? n : 0.f;
#pragma unroll
    for (int token = 0; token < C::kTokens; token++) {
        shared.tokens.query[token][key] = widened_word<C::kTokensFp32>(queries[token], g.dtype);
        shared.tokens.key[token][key] = widened_word<C::kTokensFp32>(keys[token], g.dtype);
    }
#pragma unroll
    for (int n = 0; n < kValues; n++) {
        const auto [token, position] = place_of(n);
        if (token < C::kTokens)
            shared.tokens.value[token][position] = widened_word<C::kTokensFp32>(values[n], g.dtype);
    }
}

// The b operand for tokens 8 tile + [0, 8): q^T of a block of rows.
template <class C>
__device__ inline TensorOperand<2, C::kTokensFp32> queries_of(const SequenceTokens<C::kTokens>& tokens,
                                                              int tile, int first_row,
                                                              const SequencePlace<C>& at) {
    TensorOperand<2, C::kTokensFp32> found;
    const float2 pair =
        *reinterpret_cast<const float2*>(&tokens.query[8 * tile + at.g][first_row + kPair * at.t]);
    found.set(0, pair.x);
    found.set(1, pair.y);
    return found;
}

// Each warp: q_t k_j of a slice of K and a tile of t, and q_t n of its tokens.
template <class C>
__device__ inline void score_parts(SequenceShared<C>& shared, const MlstmParams& g,
                                   const SequencePlace<C>& at) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = warp % C::kTiles, part = warp / C::kTiles;
    const auto& tokens = shared.tokens;
    float sums[4]{};  // [16 j x 8 t]
    for (int row = part * kBlock; row < g.dim_k; row += C::kParts * kBlock) {
        TensorOperand<4, C::kTokensFp32> keys{};
#pragma unroll
        for (int half = 0; half < C::kTiles; half++) {
            const float2 pair =
                *reinterpret_cast<const float2*>(&tokens.key[8 * half + at.g][row + kPair * at.t]);
            keys.set(half, pair.x);
            keys.set(2 + half, pair.y);
        }
        multiply(sums, keys, queries_of<C>(tokens, tile, row, at));
    }
#pragma unroll
    for (int half = 0; half < C::kTiles; half++) {
        shared.scores[part][8 * tile + 2 * at.t][8 * half + at.g] = sums[2 * half];
        shared.scores[part][8 * tile + 2 * at.t + 1][8 * half + at.g] = sums[2 * half + 1];
    }
    if (!g.normalize) return;
    for (int token = warp; token < C::kTokens; token += kSequenceWarps) {
        float sum = 0.f;
#pragma unroll
        for (int row = 0; row < kMlstmKeys; row += 32)
            sum += tokens.query[token][row + lane] * shared.n[row + lane];
        sum = warp_sum(sum);
        if (lane == 0) shared.query_n[token] = sum;
    }
}

// The weight of v_j in h_t, h_t's divisor, and n after the tokens.
template <class C> __device__ inline void weigh_tokens(SequenceShared<C>& shared, const MlstmParams& g) {
    const auto& gates = shared.gates;
    const int t = threadIdx.x / C::kTokens, j = threadIdx.x % C::kTokens;
    if (t < C::kTokens) {
        float score = 0.f;
#pragma unroll
        for (int part = 0; part < C::kParts; part++) score += shared.scores[part][t][j];
        score = j <= t ? g.scale * gates.weight(t, j) * score : 0.f;
        shared.scores[0][t][j] = score;
        float d = score;
#pragma unroll
        for (int step = C::kTokens / 2; step > 0; step /= 2) d += __shfl_xor_sync(kAllLanes, d, step);
        d += gates.inter[t] * shared.query_n[t];
        if (j == 0) shared.divisor[t] = g.normalize ? normaliser(d, gates.floor[t], g.eps) : 1.f;
    }
    if (!g.normalize) return;
    float n = gates.decay * shared.n[threadIdx.x];
#pragma unroll
    for (int token = 0; token < C::kTokens; token++)
        n += gates.write[token] * shared.tokens.key[token][threadIdx.x];
    shared.n[threadIdx.x] = n;
}

// The a operands v^T, per 16 columns and 8 tokens.
template <class C> struct SequenceValues {
    TensorOperand<4, C::kTokensFp32> of[C::kProducts][C::kTiles];

    __device__ inline SequenceValues(const SequenceTokens<C::kTokens>& tokens, const SequencePlace<C>& at) {
#pragma unroll
        for (int product = 0; product < C::kProducts; product++) {
#pragma unroll
            for (int tile = 0; tile < C::kTiles; tile++) {
#pragma unroll
                for (int n = 0; n < 4; n++)
                    of[product][tile].set(
                        n, tokens.value[8 * tile + at.t + n / 2 * 4][at.position + 2 * product + n % 2]);
            }
        }
    }
};

// The state as a stream: blocks of this warp's rows, kInFlight of them loaded ahead.
template <class C> struct SequenceState {
    using Before = typename C::Before;
    using After = typename C::After;

    RowPart<Before, C::kWidth, C::kVector> rows[C::kInFlight][kPair];
    const Before* from;
    After* to;
    std::int64_t stride;  // to the thread's next block
    int left;             // columns from the thread's first one to the end of the row

    __device__ inline SequenceState(const MlstmParams& g, const SequencePlace<C>& at) : rows{} {
        const int column = at.column(at.position);
        const std::int64_t row =
            static_cast<std::int64_t>(at.index) * g.dim_k + at.row_warp * kBlock + kPair * at.t;
        from = static_cast<const Before*>(g.before.c) + row * g.dim_v + column;
        to = static_cast<After*>(g.after.c) + row * g.dim_v + column;
        stride = static_cast<std::int64_t>(at.row_warps * kBlock) * g.dim_v;
        left = g.dim_v - column;
    }
    // row: the first of the two.
    __device__ inline void load(int n, int row, const MlstmParams& g) {
#pragma unroll
        for (int second = 0; second < kPair; second++)
            rows[n][second].load(from + second * g.dim_v, row + second < g.dim_k ? left : 0);
        advance(from, stride);
    }
};

// Writes C' and adds C^T q^T to `sums`, per 16 columns and 8 tokens.
template <class C>
__device__ inline void update_state(float (&sums)[C::kProducts][C::kTiles][4], SequenceState<C>& state,
                                    const SequenceShared<C>& shared, const SequenceValues<C>& values,
                                    const MlstmParams& g, const SequencePlace<C>& at) {
    const auto& tokens = shared.tokens;
    const float decay = shared.gates.decay;
    float write[C::kTiles][2];
#pragma unroll
    for (int n = 0; n < C::kTokens / 4; n++) write[n / 2][n % 2] = shared.gates.write[4 * n + at.t];

    const int next = at.row_warps * kBlock;
    for (int base = at.row_warp * kBlock; base < g.dim_k; base += C::kInFlight * next) {
#pragma unroll
        for (int n = 0; n < C::kInFlight; n++) {
            const int row = base + n * next, own_row = row + kPair * at.t;
            if (row >= g.dim_k) break;
            const RowPart<typename C::Before, C::kWidth, C::kVector> old[kPair] = {state.rows[n][0],
                                                                                   state.rows[n][1]};
            state.load(n, own_row + C::kInFlight * next, g);

            TensorOperand<2, C::kTokensFp32> queries[C::kTiles];
            TensorOperand<2, true> keys[C::kTiles];
#pragma unroll
            for (int tile = 0; tile < C::kTiles; tile++) {
                queries[tile] = queries_of<C>(tokens, tile, row, at);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    keys[tile].set(half,
                                   write[tile][half] * tokens.key[8 * tile + 4 * half + at.t][row + at.g]);
            }

            RowPart<typename C::After, C::kWidth, C::kVector> result[kPair];
#pragma unroll
            for (int product = 0; product < C::kProducts; product++) {
                float written[4]{};
#pragma unroll
                for (int tile = 0; tile < C::kTiles; tile++)
                    multiply(written, values.of[product][tile], keys[tile]);
                TensorOperand<4, C::kStateFp32> columns;
#pragma unroll
                for (int which = 0; which < 4; which++) {
                    const int second = which / 2, column = 2 * product + which % 2;
                    const float x = old[second][column];
                    columns.set(which, x);
                    // NOTES: not accumulated by the MMA, which truncates, so that C would shrink from call to
                    // call
                    result[second].set(column, fmaf(decay, x, written[which % 2 * 2 + second]));
                }
#pragma unroll
                for (int tile = 0; tile < C::kTiles; tile++)
                    multiply(sums[product][tile], columns, queries[tile]);
            }
#pragma unroll
            for (int second = 0; second < kPair; second++)
                result[second].store(state.to + second * g.dim_v,
                                     own_row + second < g.dim_k ? state.left : 0);
            advance(state.to, state.stride);
        }
    }
}

// Scales the sums, adds the contributions of the tokens themselves once, and writes them to shared memory.
template <class C>
__device__ inline void leave_sums(SequenceShared<C>& shared, float (&sums)[C::kProducts][C::kTiles][4],
                                  const SequenceValues<C>& values, const SequencePlace<C>& at) {
#pragma unroll
    for (int tile = 0; tile < C::kTiles; tile++) {
        const float inter[2] = {shared.gates.inter[8 * tile + 2 * at.t],
                                shared.gates.inter[8 * tile + 2 * at.t + 1]};
#pragma unroll
        for (int product = 0; product < C::kProducts; product++)
#pragma unroll
            for (int n = 0; n < 4; n++) sums[product][tile][n] *= inter[n % 2];
    }
    if (at.row_warp == 0) {
#pragma unroll
        for (int of_t = 0; of_t < C::kTiles; of_t++) {
#pragma unroll
            for (int of_j = 0; of_j <= of_t; of_j++) {
                const float* scores = &shared.scores[0][8 * of_t + at.g][8 * of_j + at.t];
                TensorOperand<2, true> shares;
                shares.set(0, scores[0]);
                shares.set(1, scores[4]);
#pragma unroll
                for (int product = 0; product < C::kProducts; product++)
                    multiply(sums[product][of_t], values.of[product][of_j], shares);
            }
        }
    }
    const int row = at.columns + SequenceShared<C>::kRowPad;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; tile++) {
#pragma unroll
        for (int second = 0; second < 2; second++) {
            const int token = 8 * tile + 2 * at.t + second;
            float* to = &shared.sums[(at.row_warp * C::kTokens + token) * row + at.position];
#pragma unroll
            for (int product = 0; product < C::kProducts; product += 2) {
                const auto &x = sums[product][tile], &y = sums[product + 1][tile];
                *reinterpret_cast<float4*>(to + 2 * product) = {x[second], x[2 + second], y[second],
                                                                y[2 + second]};
            }
        }
    }
}

// Adds up the partial sums of the warps in a fixed order, and divides.
template <class C>
__device__ inline void write_output(const SequenceShared<C>& shared, const MlstmParams& g,
                                    const SequencePlace<C>& at) {
    const int row = at.columns + SequenceShared<C>::kRowPad;
    for (int n = threadIdx.x; n < g.tokens << at.log2_columns; n += kSequenceThreads) {
        const int token = n >> at.log2_columns, position = n & (at.columns - 1), column = at.column(position);
        if (column >= g.dim_v) continue;
        float h = 0.f;
        for (int warp = 0; warp < at.row_warps; warp++)
            h += shared.sums[(warp * C::kTokens + token) * row + position];
        const std::int64_t place =
            (static_cast<std::int64_t>(at.index) * g.tokens + token) * g.dim_v + column;
        store_number(g.h, g.dtype, place, h / shared.divisor[token]);
    }
}

template <class C>
__global__ __launch_bounds__(kSequenceThreads, kSequenceCtas) void mlstm_sequence_kernel(
    const __grid_constant__ MlstmParams g) {
    TFLA_DEVICE_CODE {
        __shared__ SequenceShared<C> shared;
        const SequencePlace<C> at(g);
        SequenceState<C> state(g, at);
#pragma unroll
        for (int n = 0; n < C::kInFlight; n++)
            state.load(n, (at.row_warp + n * at.row_warps) * kBlock + kPair * at.t, g);

        // while C is in flight: everything that depends on the tokens alone
        load_tokens(shared, g, at);
        __syncthreads();
        if (g.in_place) arrive_at_cluster();
        const SequenceValues<C> values(shared.tokens, at);
        score_parts(shared, g, at);
        __syncthreads();
        weigh_tokens(shared, g);

        float sums[C::kProducts][C::kTiles][4]{};
        update_state(sums, state, shared, values, g, at);
        __syncthreads();
        leave_sums(shared, sums, values, at);
        __syncthreads();
        write_output(shared, g, at);

        if (g.in_place) wait_for_cluster();
        if (blockIdx.x != 0) return;
        const int key = threadIdx.x;
        if (key < g.dim_k)
            store_number(g.after.n, g.after.n_dtype, static_cast<std::int64_t>(at.index) * g.dim_k + key,
                         shared.n[key]);
        if (key == 0 && !g.sigmoid_gate) store_number(g.after.m, g.after.m_dtype, at.index, shared.gates.m);
    }
}

}  // namespace tfla_tk::decode
