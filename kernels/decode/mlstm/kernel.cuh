// A few tokens of mLSTM: the state is read once and written once, which bounds the time.
//
//     1  load the first rows of C, then the tokens, their gates, n and m
//     2  while C comes: the tokens' factors, n behind them, q n; keys, queries and values to shared memory
//     3  stream C: per row every token in turn, C in registers, with q C added up
//     4  q C over the rows of a warp, over the warps in a fixed order, h
//     5  n and m
//
// CTAs: slices of V, heads, batch entries. A CTA has all rows of a slice: its threads form groups of `lanes`
// side by side in a row, and a thread owns kWidth columns of every group-th row.
//
// In place, the first slice's CTA must not write n and m before the others have read them. So the slices of a
// head form a cluster: all arrive at its barrier when they have read n, and the first waits there before it
// writes. No flag in global memory is needed, so concurrent calls and graph replays cannot interfere.
#pragma once

#include "common/cluster.cuh"
#include "common/kernel.cuh"
#include "decode/mlstm/gates.cuh"
#include "decode/numbers.cuh"

namespace tfla_tk::decode {

constexpr int kMlstmThreads = 256, kMlstmLeastLanes = 4, kMlstmLanes = 32;
static_assert(kMlstmKeys <= kMlstmThreads);

// Before, After: types of C. kTokens: the most of a call: 1, 8 or 16. kVector: a thread's columns move as one
// word; otherwise it has one.
template <class Before_, class After_, int kTokens_, bool kVector_> struct MlstmConfig {
    using Before = Before_;
    using After = After_;
    static constexpr int kTokens = kTokens_;
    // the registers hold v and q C of every token for each column
    static constexpr int kMost = kTokens == 1 ? 8 : kTokens == 8 ? 4 : 2;
    static constexpr int kOfWord = 16 / (sizeof(Before) > sizeof(After) ? sizeof(Before) : sizeof(After));
    static constexpr int kWidth = !kVector_ ? 1 : kOfWord < kMost ? kOfWord : kMost;
    // rows that a thread takes through the tokens together
    static constexpr int kRows = kTokens == 1 ? 1 : 4;
    static_assert(kMlstmThreads / kMlstmLeastLanes * kRows <= kMlstmKeys);
    // rows of a thread in flight, up to 128 bytes, limited by registers
    static constexpr int kOfBytes = 128 / (kWidth * static_cast<int>(sizeof(Before)));
    static constexpr int kMostInFlight = kTokens == 1 ? 8 : 12;
    static constexpr int kSets = (kOfBytes < kMostInFlight ? kOfBytes : kMostInFlight) / kRows;
    // CTAs per multiprocessor, limited by registers: 80 per thread with one token, a few more where the state
    // becomes narrower, and 128 with several
    static constexpr int kCtas = kTokens > 1 || sizeof(Before) > sizeof(After) ? 2 : 3;
};

template <class C> struct MlstmShared {
    static constexpr int kWarps = kMlstmThreads / 32, kColumns = kMlstmLanes * C::kWidth, T = C::kTokens;
    union {
        float2 pairs[T][kMlstmKeys];      // k and q by MlstmSlice::place
        float sums[kWarps][T][kColumns];  // q C over the rows of a warp, when nobody reads the pairs any more
    };
    float values[T][kColumns];  // what is written of v
    float n[kMlstmKeys];        // behind the tokens
    float norms[kWarps][T];     // q n over the keys of a warp
    float shown[T];             // factor on q C
    float payment[T], floor[T], eps[T];
    float m;
};

// Of a power of two. NOTES: a template, since the host half, which only parses it, knows no __ffs.
template <class X> __device__ inline int log2_of(X x) { return __ffs(x) - 1; }

template <class C> struct MlstmSlice {
    using Before = typename C::Before;
    using After = typename C::After;
    static constexpr int T = C::kTokens, W = C::kWidth, R = C::kRows, kSets = C::kSets;
    static constexpr int kWarps = kMlstmThreads / 32;

    const MlstmParams& p;
    MlstmShared<C>& shared;
    const int batch, head, index;  // index: of the head in all heads
    const int log2_lanes, log2_columns, groups, columns, first_column, lane, group;
    const int rows;    // of the slice, 0 where the thread's columns are behind V
    const int stride;  // to the thread's next row
    const Before* from;
    Columns<Before, W> words[kSets][R]{};
    unsigned paid;  // a bit per token: C is multiplied by its payment

    __device__ inline MlstmSlice(const MlstmParams& p, MlstmShared<C>& shared, int batch, int head)
        : p(p),
          shared(shared),
          batch(batch),
          head(head),
          index(batch * p.heads + head),
          log2_lanes(log2_of(p.lanes)),
          log2_columns(log2_lanes + log2_of(W)),
          groups(kMlstmThreads >> log2_lanes),
          columns(W << log2_lanes),
          first_column(blockIdx.x * columns),
          lane(threadIdx.x & (p.lanes - 1)),
          group(threadIdx.x >> log2_lanes),
          rows(first_column + lane * W < p.dim_v ? p.dim_k : 0),
          stride(groups * p.dim_v),
          from(static_cast<const Before*>(p.before.c) + first_element(threadIdx.x)) {}

    // Of a thread, in C.
    __device__ inline std::int64_t first_element(int thread) const {
        const std::int64_t row = static_cast<std::int64_t>(index) * p.dim_k + (thread >> log2_lanes);
        return row * p.dim_v + first_column + (thread & (p.lanes - 1)) * W;
    }

    __device__ inline void run() {
#pragma unroll
        for (int set = 0; set < kSets; set++) load_rows(set, group + set * groups * R);
        load_tokens();
        __syncthreads();
        if (p.in_place) arrive_at_cluster();
        float sums[T][W]{};
        update(sums);
        add_up(sums);
        write_h();
        if (p.in_place) wait_for_cluster();
        if (blockIdx.x != 0) return;
        const int key = threadIdx.x;
        if (key < p.dim_k)
            store_number(p.after.n, p.after.n_dtype, static_cast<std::int64_t>(index) * p.dim_k + key,
                         shared.n[key]);
        if (key == 0 && !p.sigmoid_gate) store_number(p.after.m, p.after.m_dtype, index, shared.m);
    }

    // row: the first of the set. Where there is no row, what was there before stays: its k and q are 0.
    __device__ inline void load_rows(int set, int row) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (row + r * groups < rows) words[set][r].load(from);
            advance(from, stride);
        }
    }

    // Where the pair of a key lies: the rows that a thread takes together are neighbours.
    __device__ inline int place(int key) const {
        const int of_set = key & (groups * R - 1);
        return key - of_set + (of_set & (groups - 1)) * R + of_set / groups;
    }

    // All loads are issued before the first is waited for.
    __device__ inline void load_tokens() {
        constexpr int kValues = (T * MlstmShared<C>::kColumns + kMlstmThreads - 1) / kMlstmThreads;
        const int key = threadIdx.x, warp = threadIdx.x / 32, of_warp = threadIdx.x % 32, last = p.tokens - 1;
        const bool has_key = key < p.dim_k;
        const auto gate_of = [&](const Gate& x, int token) {
            return Loaded<1>(x.data, x.dtype,
                             batch * x.batch_stride + head * x.head_stride + token * x.row_stride);
        };
        const auto place_of = [&](const MlstmRows& x, int token, int column) {
            const std::int64_t at = batch * x.batch_stride + head * x.head_stride + token * x.token_stride +
                                    column * x.column_stride;
            return static_cast<const char*>(x.data) + Loaded<1>(p.dtype).bytes(at);
        };
        const MlstmState& state = p.before;
        const bool has_m = !p.sigmoid_gate;
        const int token = T == 1 ? 0 : min(of_warp, last), some_key = has_key ? key : 0;
        const Loaded<1> i = gate_of(p.i, token), f = gate_of(p.f, token);
        const Loaded<1> m(has_m ? state.m : state.n, has_m ? state.m_dtype : state.n_dtype,
                          has_m ? index : 0);
        const Loaded<1> n_before(state.n, state.n_dtype,
                                 static_cast<std::int64_t>(index) * p.dim_k + some_key);
        Loaded<T> keys(p.dtype), queries(p.dtype);
        const char *key_at = place_of(p.k, 0, some_key), *query_at = place_of(p.q, 0, some_key);
#pragma unroll
        for (int t = 0; t < T; t++) {
            keys.load(t, key_at), queries.load(t, query_at);
            if (T > 1 && t < last) {
                advance(key_at, keys.bytes(p.k.token_stride));
                advance(query_at, keys.bytes(p.q.token_stride));
            }
        }
        Loaded<kValues> values(p.dtype);
#pragma unroll
        for (int n = 0; n < kValues; n++) {
            const int number = threadIdx.x + n * kMlstmThreads, column = number & (columns - 1);
            const int token = min(number >> log2_columns, last);
            values.load(n, place_of(p.v, token, min(first_column + column, p.dim_v - 1)));
        }

        const Factors factors = factors_of<T>(p, i[0], f[0], m[0]);
        const Debt debt = Debt::of<T>(factors.decay, p.tokens);
        paid = debt.paid;
        const float written = factors.write / debt.own;
#pragma unroll
        for (int n = 0; n < kValues; n++) {
            const int number = threadIdx.x + n * kMlstmThreads, place = number & (columns - 1);
            const int of = number >> log2_columns;
            const float write = T == 1 ? written : __shfl_sync(kAllLanes, written, of % 32);
            if (of < T) shared.values[of][place] = write * values[n];
        }
        float n = n_before[0];
        constexpr int kTogether = T < 8 ? T : 8, kLanes = 32 / kTogether;
#pragma unroll
        for (int start = 0; start < T; start += kTogether) {
            float norms[kTogether];
#pragma unroll
            for (int t = start; t < start + kTogether; t++) {
                const float k = has_key ? keys[t] : 0.f, q = has_key ? queries[t] : 0.f;
                shared.pairs[t][place(key)] = {k, q};
                const float decay = T == 1 ? factors.decay : __shfl_sync(kAllLanes, factors.decay, t);
                const float write = T == 1 ? factors.write : __shfl_sync(kAllLanes, factors.write, t);
                if (p.normalize && (T == 1 || t <= last)) n = decay * n + write * k;
                norms[t - start] = q * n;
            }
            const float norm = sum_by_halving<kTogether, 16, 1>(norms, of_warp);
            if (of_warp % kLanes == 0) shared.norms[warp][start + of_warp / kLanes] = norm;
        }
        shared.n[key] = n;
        if (warp == 0 && of_warp <= last) {
            shared.shown[of_warp] = p.scale * debt.own, shared.payment[of_warp] = debt.payment;
            shared.floor[of_warp] = factors.floor, shared.eps[of_warp] = factors.eps;
            if (of_warp == last) shared.m = factors.m;
        }
    }
    // Writes C behind the tokens, and adds q C to the sums.
    __device__ inline void update(float (&sums)[T][W]) {
        // NOTES: made only here, from the thread reread: above, registers hold the loads in flight and the
        // tokens
        After* to = static_cast<After*>(p.after.c) + first_element(fresh_thread());
        float values[T][W];
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int e = 0; e < W; e++) values[t][e] = shared.values[t][lane * W + e];
        const int of_set = groups * R;
        for (int base = 0; base < p.dim_k; base += kSets * of_set) {
#pragma unroll
            for (int set = 0; set < kSets; set++) {
                const int first = base + set * of_set, row = first + group;
                if (T > 1 && first >= p.dim_k) break;
                const int place = T == 1 ? row & (kMlstmKeys - 1) : first + group * R;
                float s[R][W];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const Columns<Before, W> old = words[set][r];
#pragma unroll
                    for (int e = 0; e < W; e++) s[r][e] = old[e];
                }
                load_rows(set, row + kSets * of_set);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    if (T > 1 && t >= p.tokens) break;
                    take_token(s, sums[t], values[t], t, place, row < rows);
                }
#pragma unroll
                for (int r = 0; r < R; r++) {
                    Columns<After, W> next;
#pragma unroll
                    for (int e = 0; e < W; e++) next.set(e, s[r][e]);
                    if (row + r * groups < rows) next.store(to);
                    advance(to, stride);
                }
            }
        }
    }

    // place: of the rows' pairs. exists: the first row does.
    __device__ inline void take_token(float (&s)[R][W], float (&sum)[W], const float (&value)[W], int t,
                                      int place, bool exists) const {
        if (T == 1 || (paid >> t & 1)) {
            const float payment = shared.payment[t];
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int e = 0; e < W; e++) s[r][e] *= payment;
        }
        float2 pairs[R];
#pragma unroll
        for (int r = 0; r < R; r++) pairs[r] = shared.pairs[t][place + r];
        if (T == 1 && !exists) pairs[0].y = 0.f;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int e = 0; e < W; e++) {
                s[r][e] = fmaf(pairs[r].x, value[e], s[r][e]);
                sum[e] = fmaf(pairs[r].y, s[r][e], sum[e]);
            }
    }

    // Leaves the sums over the rows of a warp in shared memory.
    __device__ inline void add_up(float (&sums)[T][W]) {
        const int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int e = 0; e < W; e++)
                for (int step = p.lanes; step < 32; step *= 2)
                    sums[t][e] += __shfl_xor_sync(kAllLanes, sums[t][e], step);
        __syncthreads();
        if (lane_of_warp < p.lanes) {
#pragma unroll
            for (int t = 0; t < T; t++)
#pragma unroll
                for (int e = 0; e < W; e++) shared.sums[warp][t][lane * W + e] = sums[t][e];
        }
        __syncthreads();
    }

    __device__ inline void write_h() const {
        for (int number = threadIdx.x; number < p.tokens * columns; number += kMlstmThreads) {
            const int t = number >> log2_columns, place = number & (columns - 1);
            const int column = first_column + place;
            if (column >= p.dim_v) continue;
            float h = 0.f, d = 0.f;
#pragma unroll
            for (int warp = 0; warp < kWarps; warp++)
                h += shared.sums[warp][t][place], d += shared.norms[warp][t];
            h *= shared.shown[t];
            // NOTES: not fmaxf, which would drop a NaN of d
            const float size = fabsf(p.scale * d);
            if (p.normalize) h /= (size < shared.floor[t] ? shared.floor[t] : size) + shared.eps[t];
            const std::int64_t token = static_cast<std::int64_t>(index) * p.tokens + t;
            store_number(p.h, p.dtype, token * p.dim_v + column, h);
        }
    }
};

// A grid has a part of the heads and batch entries, from these on.
struct MlstmGlobals {
    MlstmParams p;
    int batch, head;
};

template <class C>
__global__ __launch_bounds__(kMlstmThreads,
                             C::kCtas) void mlstm_kernel(const __grid_constant__ MlstmGlobals g) {
    TFLA_DEVICE_CODE {
        __shared__ MlstmShared<C> shared;
        MlstmSlice<C> slice(g.p, shared, g.batch + blockIdx.z, g.head + blockIdx.y);
        slice.run();
    }
}

}  // namespace tfla_tk::decode
