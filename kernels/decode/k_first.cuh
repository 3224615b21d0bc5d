// A state [K, V]: a CTA owns a slice of columns. Of a pass its numbers are in registers; where the next pass
// is staged, that is in shared memory meanwhile.
#pragma once

#include "decode/tokens.cuh"

namespace tfla_tk::decode {

// Sums of S^T k and S^T q: over a thread's rows, over the lanes of a warp by shuffles, over the warps in
// shared memory (of all first chains, then of all second ones), behind a barrier: one per token by the delta
// rule, whose u takes S^T k, else one per pass. Two sets of sums, used in turn, need no second barrier.
template <class C> struct KFirst {
    using State = typename C::State;
    using P = typename C::Part;
    static constexpr int K = C::K, T = C::kTokens, kWarps = C::kThreads / 32;
    static constexpr int L = P::kLanes, R = P::kRows, kSide = 32 / L;
    static constexpr int kChains = P::kChains, kSums = kChains * kWarps;
    static constexpr bool kDelta = C::kDelta;

    struct Memory {
        Tokens<C> tokens;
        // over the rows of a warp's chain
        float4 keys[kDelta ? 2 : 1][kSums][L];                 // S^T k
        float4 queries[2][kDelta ? 1 : C::kTokens][kSums][L];  // S^T q
        Four<State> staged[C::kStaged ? R : 1][C::kStaged ? C::kThreads : 1];
    };

    const DecodeParams& p;
    Memory& memory;
    const Entry entry;
    const bool goes_on;  // behind a turn that has written the state
    // column: a group of four columns of a pass; row: the first one of R, kStep apart; slice, count: the
    // CTA's first column of V, and how many it has
    const int passes, lane, warp, column, row, head, slice, count;
    std::int64_t out;
    const State* from;
    State* to;
    std::int64_t stride;   // between two rows of a thread
    Four<State> words[R];  // of the pass to come; where that is staged, of the pass that begins
    int set = 0;

    __device__ inline KFirst(const DecodeParams& p, Memory& memory, int passes, int start)
        : p(p),
          memory(memory),
          entry(p, blockIdx.z, start),
          goes_on(start > 0),
          passes(passes),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          column(lane % L),
          row(warp * kSide + lane / L),
          head(blockIdx.y),
          slice(blockIdx.x * passes * C::kSlice),
          count(passes * C::kSlice),
          stride(static_cast<std::int64_t>(P::kStep) * p.dim_v) {}

    // Whether the entry has no more tokens than this turn takes.
    __device__ inline bool is_last() const { return T == 1 || entry.tokens <= tokens_of_turn<C>(p); }

    __device__ inline void run(int start) {
        const int slot = slot_before(p.slots, blockIdx.z, start);
        const int after = p.slots.every ? slot_of(p.slots, blockIdx.z, start) : slot;
        const int tokens = T == 1 ? 1 : min(tokens_of_turn<C>(p), entry.tokens);
        // what does not depend on the slot is in flight while it is
        RawToken<C> raw;
        if (warp < tokens) raw.load(p, entry, warp, head, slice, count, lane);
        out = start_of(p.o, entry.batch, entry.first, head) + slice;
        if (min(slot, after) < 0) return store_zeros(tokens);

        const std::int64_t element =
            (static_cast<std::int64_t>(head) * K + row) * p.dim_v + slice + column * 4;
        const StatePool& before = goes_on ? p.after : p.before;
        from = static_cast<const State*>(before.data) + slot * before.slot_stride + element;
        to = static_cast<State*>(p.after.data) + after * p.after.slot_stride + element;
        load_state();
        if (warp < tokens) raw.finish(p, memory.tokens, warp, head, count, lane);
        if constexpr (kWarps < T) {
#pragma unroll 1
            for (int t = warp + kWarps; t < tokens; t += kWarps) {
                raw.load(p, entry, t, head, slice, count, lane);
                raw.finish(p, memory.tokens, t, head, count, lane);
            }
        }
        __syncthreads();

#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            float s[R][4];
            take_state(s);
            const bool more = pass + 1 < passes;
            if (C::kStaged && more) load_state();
#pragma unroll 1
            for (int t = 0; t < tokens; t++) step(s, pass, t);
            store_state(s);
            if constexpr (!kDelta) store_outputs(pass, tokens);
            // NOTES: behind the stores, since the words take the registers of s
            if (!C::kStaged && more) load_state();
            out += C::kSlice;
        }
    }

    __device__ inline void store_zeros(int tokens) {
#pragma unroll 1
        for (int t = 0; t < tokens; t++)
#pragma unroll 1
            for (int n = threadIdx.x; n < count; n += C::kThreads)
                store_output(p, out + t * p.o.token_stride + n, 0.f);
    }

    __device__ inline void load_state() {
        if (goes_on || p.before.data != nullptr) {
            const State* at = from;
#pragma unroll
            for (int r = 0; r < R; r++) {
                if constexpr (C::kStaged)
                    copy_four(&memory.staged[r][threadIdx.x], at);
                else
                    words[r] = load_four(at);
                advance(at, stride);
            }
        } else {
#pragma unroll
            for (int r = 0; r < R; r++) {
                if constexpr (C::kStaged)
                    memory.staged[r][threadIdx.x] = {};
                else
                    words[r] = {};
            }
        }
        from += C::kSlice;
    }

    __device__ inline void take_state(float (&s)[R][4]) {
        if constexpr (C::kStaged) wait_for_copies();
#pragma unroll
        for (int r = 0; r < R; r++) {
            if constexpr (C::kStaged) words[r] = memory.staged[r][threadIdx.x];
            widen<State>(s[r], words[r]);
        }
    }

    __device__ inline void store_state(const float (&s)[R][4]) {
        if (p.after.data != nullptr) {
            State* at = to;
#pragma unroll
            for (int r = 0; r < R; r++) {
                store_four(at, narrow<State>(s[r]));
                advance(at, stride);
            }
        }
        to += C::kSlice;
    }

    // One token: x = S^T k and y = S^T q of the decayed state, u, S; by the delta rule o, too.
    __device__ inline void step(float (&s)[R][4], int pass, int t) {
        float x[kChains][4] = {}, y[kChains][4] = {};
#pragma unroll
        for (int r = 0; r < R; r++) {
            const Channels<C> channels = channels_of(r, t);
            float *const keys = x[r % kChains], *const queries = y[r % kChains];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if constexpr (kDelta) keys[e] = __fmaf_rn(s[r][e], channels.decayed_k[r % 4], keys[e]);
                queries[e] = __fmaf_rn(s[r][e], channels.decayed_q[r % 4], queries[e]);
            }
        }
        auto leave = [&](float4(&to)[kSums][L], float (&sums)[kChains][4]) {
#pragma unroll
            for (int chain = 0; chain < kChains; chain++)
                reinterpret_cast<float*>(to[warp + chain * kWarps])[own_column()] =
                    sum_by_halving<4, 16, L>(sums[chain], lane);
        };
        if constexpr (kDelta) leave(memory.keys[set], x);
        leave(memory.queries[set][kDelta ? 0 : t], y);
        if constexpr (kDelta) __syncthreads();

        float u[4];
        widen<float>(u, *reinterpret_cast<const float4*>(&memory.tokens.v[t][pass * C::kSlice + column * 4]));
        if constexpr (kDelta) {
            float sum[4] = {};
#pragma unroll
            for (int w = 0; w < kSums; w++) {
                float of_warp[4];
                widen<float>(of_warp, memory.keys[set][w][column]);
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e] = __fadd_rn(sum[e], of_warp[e]);
            }
            const float beta = memory.tokens.beta[t];
#pragma unroll
            for (int e = 0; e < 4; e++) u[e] = __fmul_rn(beta, __fsub_rn(u[e], sum[e]));
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            const Channels<C> channels = channels_of(r, t);
#pragma unroll
            for (int e = 0; e < 4; e++)
                decay_and_add(s[r][e], channels.decay[r % 4], channels.k[r % 4], u[e]);
            round_between_tokens<C>(s[r]);
        }
        if constexpr (kDelta) {
            const int e = lane / 8;  // of this lane's four columns the one that it stores
            if (warp == 0) store_output_of(t, 0, e == 0 ? u[0] : e == 1 ? u[1] : e == 2 ? u[2] : u[3]);
            set ^= 1;
        }
    }

    // Those of the thread's row r and of its three neighbours: its keys lie together (Part::place).
    __device__ inline Channels<C> channels_of(int r, int t) const {
        return Channels<C>(memory.tokens, t, row * R + r / 4 * 4);
    }
    // A lane gets the sums of one of its four columns.
    __device__ inline int own_column() const { return column * 4 + lane / 8; }

    // Those of the tokens of a pass.
    __device__ inline void store_outputs(int pass, int tokens) {
        __syncthreads();
#pragma unroll 1
        for (int t = warp; t < tokens; t += kWarps)
            store_output_of(t, t, memory.tokens.v[t][pass * C::kSlice + own_column()]);
        set ^= 1;
    }
    // o = y + (k.q) u, by one warp.
    __device__ inline void store_output_of(int t, int place, float u) const {
        const float* const sums = reinterpret_cast<const float*>(&memory.queries[set][place][0][0]);
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kSums; w++) sum = __fadd_rn(sum, sums[w * C::kSlice + own_column()]);
        store_output(p, out + t * p.o.token_stride + own_column(),
                     __fmaf_rn(memory.tokens.key_query[t], u, sum));
    }
};

}  // namespace tfla_tk::decode
