// A state [V, K]: a warp owns rows of it, and needs nothing of other warps but the tokens.
#pragma once

#include "decode/tokens.cuh"

namespace tfla_tk::decode {

// With one token a warp is a CTA. Otherwise each token is prepared by one warp, and one barrier follows,
// behind the loads in flight.
template <class C> struct VFirst {
    using State = typename C::State;
    using P = typename C::Part;
    static constexpr int K = C::K, T = C::kTokens;
    static constexpr int L = P::kLanes, R = P::kRows, W = P::kWords;
    static constexpr int kPerRow = L / R;  // lanes that have the sums of one row
    static constexpr bool kShared = T > 1;
    static constexpr bool kDelta = C::kDelta;
    static_assert(R <= L);

    struct Memory {
        Tokens<C> tokens;
        Four<State> staged[C::kStaged ? R * W : 1][C::kStaged ? C::kThreads : 1];
    };

    const DecodeParams& p;
    Memory& memory;
    const Entry entry;
    const bool goes_on;  // behind a turn that has written the state
    const int passes, lane, warp, sub, side, head, slice;
    const int own;      // the row whose sums this lane gets
    const bool writes;  // its numbers of o
    std::int64_t out;   // of o, for that row
    const State* from;
    State* to;
    Four<State> words[R][W];  // of the pass to come, where they are not staged
    unsigned own_value;       // of v, of one token

    __device__ inline VFirst(const DecodeParams& p, Memory& memory, int passes, int start)
        : p(p),
          memory(memory),
          entry(p, blockIdx.z, start),
          goes_on(start > 0),
          passes(passes),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          sub(lane % L),
          side(lane / L),
          head(blockIdx.y),
          slice(blockIdx.x * passes * C::kSlice + warp * P::kWarpSlice),
          own(slice + sub / kPerRow * P::kSide + side),
          writes(sub % kPerRow == 0) {}

    // Whether the entry has no more tokens than this turn takes.
    __device__ inline bool is_last() const { return T == 1 || entry.tokens <= tokens_of_turn<C>(p); }

    __device__ inline void run(int start) {
        const int slot = slot_before(p.slots, blockIdx.z, start);
        const int after = p.slots.every ? slot_of(p.slots, blockIdx.z, start) : slot;
        const int tokens = T == 1 ? 1 : min(tokens_of_turn<C>(p), entry.tokens);
        // what does not depend on the slot is in flight while it is
        RawToken<C> raw;
        if (warp < tokens) raw.load(p, entry, warp, head, first_column(), passes * C::kSlice, lane);
        out = start_of(p.o, entry.batch, entry.first, head) + own;
        if (min(slot, after) < 0) return store_zeros(tokens);

        const std::int64_t element = (static_cast<std::int64_t>(head) * p.dim_v + slice + side) * K + sub * 4;
        const StatePool& before = goes_on ? p.after : p.before;
        from = static_cast<const State*>(before.data) + slot * before.slot_stride + element;
        to = static_cast<State*>(p.after.data) + after * p.after.slot_stride + element;
        // before the state: in fp32 it waits for the token's bits
        if constexpr (!kShared)
            own_value = load_bits(p.v.data, p.v.dtype, start_of(p.v, entry.batch, entry.first, head) + own);
        load_state();
        if (warp < tokens) raw.finish(p, memory.tokens, warp, head, passes * C::kSlice, lane);
        __syncthreads();

#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            float s[R][W][4];
            take_state(s);
            const bool more = pass + 1 < passes;
            if (C::kStaged && more) load_state();
#pragma unroll 1
            for (int t = 0; t < tokens; t++) step(memory.tokens, s, pass, t);
            store_state(s);
            out += C::kSlice;
            // NOTES: behind the stores, since the words take the registers of s
            if (!C::kStaged && more) load_state();
        }
    }

    __device__ inline void store_zeros(int tokens) {
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++)
#pragma unroll 1
            for (int t = 0; t < tokens; t++)
                if (writes) store_output(p, out + pass * C::kSlice + t * p.o.token_stride, 0.f);
    }

    __device__ inline int first_column() const { return blockIdx.x * passes * C::kSlice; }

    __device__ inline void load_state() {
        if (goes_on || p.before.data != nullptr) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++) {
                    const State* const at = from + r * P::kSide * K + w * L * 4;
                    if constexpr (C::kStaged)
                        copy_four(&memory.staged[r * W + w][threadIdx.x], at);
                    else
                        words[r][w] = load_four(at);
                }
        } else {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++) {
                    if constexpr (C::kStaged)
                        memory.staged[r * W + w][threadIdx.x] = {};
                    else
                        words[r][w] = {};
                }
        }
        from += C::kSlice * K;
    }

    __device__ inline void take_state(float (&s)[R][W][4]) {
        if constexpr (C::kStaged) wait_for_copies();
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int w = 0; w < W; w++) {
                if constexpr (C::kStaged) words[r][w] = memory.staged[r * W + w][threadIdx.x];
                widen<State>(s[r][w], words[r][w]);
            }
    }

    __device__ inline void store_state(const float (&s)[R][W][4]) {
        if (p.after.data != nullptr) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++)
                    store_four(to + r * P::kSide * K + w * L * 4, narrow<State>(s[r][w]));
        }
        to += C::kSlice * K;
    }

    // One token: x = S^T k and y = S^T q of the decayed state, u, S, o = y + (k.q) u.
    __device__ inline void step(const Tokens<C>& prepared, float (&s)[R][W][4], int pass, int t) {
        float x[R] = {}, y[R] = {};
        float k[W][4], decay[W][4];
#pragma unroll
        for (int w = 0; w < W; w++) {
            const Channels<C> channels(prepared, t, (w * L + sub) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) k[w][e] = channels.k[e], decay[w][e] = channels.decay[e];
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if constexpr (kDelta) x[r] = __fmaf_rn(s[r][w][e], channels.decayed_k[e], x[r]);
                    y[r] = __fmaf_rn(s[r][w][e], channels.decayed_q[e], y[r]);
                }
        }
        float u;
        if constexpr (kShared)
            u = prepared.v[t][pass * C::kSlice + own - first_column()];
        else
            u = number_of(own_value, p.v.dtype);
        if constexpr (kDelta)
            u = __fmul_rn(prepared.beta[t], __fsub_rn(u, sum_by_halving<R, L / 2, 1>(x, lane)));
        const float sum = sum_by_halving<R, L / 2, 1>(y, lane);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float of_row = __shfl_sync(kAllLanes, u, lane - sub + r * kPerRow);
#pragma unroll
            for (int w = 0; w < W; w++) {
#pragma unroll
                for (int e = 0; e < 4; e++) decay_and_add(s[r][w][e], decay[w][e], k[w][e], of_row);
                round_between_tokens<C>(s[r][w]);
            }
        }
        if (writes) store_output(p, out + t * p.o.token_stride, __fmaf_rn(prepared.key_query[t], u, sum));
    }
};

}  // namespace tfla_tk::decode
