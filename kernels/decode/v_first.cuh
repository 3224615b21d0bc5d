// A state [V, K]: a warp owns rows of it, and needs nothing of other warps but the tokens.
#pragma once

#include "decode/tokens.cuh"

namespace tfla_tk::decode {

// With one token each warp prepares it for itself, without a barrier of the CTA. Otherwise each token is
// prepared by one warp, and one barrier follows, behind the loads in flight.
template <class C> struct VFirst {
    using State = typename C::State;
    using P = typename C::Part;
    static constexpr int K = C::K, T = C::kTokens, kWarps = P::kThreads / 32;
    static constexpr int L = P::kLanes, R = P::kRows, W = P::kWords;
    static constexpr int kPerRow = L / R;  // lanes that have the sums of one row
    static constexpr bool kShared = T > 1;
    static constexpr bool kDelta = C::kWrite == Write::delta;
    static_assert(R <= L);

    struct Memory {
        Tokens<C> tokens[kShared ? 1 : kWarps];
    };

    const DecodeParams& p;
    Memory& memory;
    const Entry entry;
    const int start;     // the number of the first token
    const bool goes_on;  // behind a turn that has written the state
    const int passes, lane, warp, sub, side, head, slice;
    const int own;            // the row whose sums this lane gets
    const bool writes;        // its numbers of o
    std::int64_t out, value;  // of o and v, for that row
    const State* from;
    State* to;
    Four<State> words[R][W];
    unsigned own_value;  // of v, of one token

    __device__ inline VFirst(const DecodeParams& p, Memory& memory, int passes, int start)
        : p(p),
          memory(memory),
          entry(p, blockIdx.z, start),
          start(start),
          goes_on(start > 0),
          passes(passes),
          lane(threadIdx.x % 32),
          warp(threadIdx.x / 32),
          sub(lane % L),
          side(lane / L),
          head(blockIdx.y),
          slice(blockIdx.x * passes * P::kSlice + warp * P::kWarpSlice),
          own(slice + sub / kPerRow * P::kSide + side),
          writes(sub % kPerRow == 0) {}

    // Whether the entry has no more tokens than this turn takes.
    __device__ inline bool is_last() const { return T == 1 || entry.tokens <= T; }

    __device__ inline void run() {
        const int slot = slot_before(p.slots, blockIdx.z, start);
        // where the state behind the tokens goes; of several tokens each may have its own
        const int after = T == 1 && p.slots.every ? slot_of(p.slots, blockIdx.z, 0) : slot;
        const int tokens = T == 1 ? 1 : min(T, entry.tokens);
        // what does not depend on the slot is in flight while it is
        RawToken<C> raw;
        const int first = kShared ? warp : 0;
        if (first < tokens) raw.load(p, entry, first, head, first_column(), passes * P::kSlice, lane);
        out = start_of(p.o, entry.batch, entry.first, head) + own;
        value = start_of(p.v, entry.batch, entry.first, head) + own;
        if (min(slot, after) < 0) return store_zeros(tokens);

        const std::int64_t element = (static_cast<std::int64_t>(head) * p.dim_v + slice + side) * K + sub * 4;
        const StatePool& before = goes_on ? p.after : p.before;
        from = static_cast<const State*>(before.data) + slot * before.slot_stride + element;
        to = static_cast<State*>(p.after.data) + after * p.after.slot_stride + element;
        if constexpr (!kShared) load_value();  // before the state: in fp32 it waits for the token's bits
        load_state();
        Tokens<C>& prepared = memory.tokens[kShared ? 0 : warp];
        if (first < tokens) raw.finish(p, prepared, first, passes * P::kSlice, lane);
        if constexpr (kShared)
            __syncthreads();
        else
            __syncwarp();

#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            float s[R][W][4];
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++) widen<State>(s[r][w], words[r][w]);
            const bool more = pass + 1 < passes;
            // NOTES: of fp32 behind the stores, since it takes the registers of s
            if (sizeof(State) < 4 && more) load_state();
#pragma unroll 1
            for (int t = 0; t < tokens; t++) {
                step(prepared, s, pass, t);
                if (T > 1 && p.slots.every) store_between(s, slot, t);
            }
            if (T == 1 || !p.slots.every) store_state(s, to);
            to += P::kSlice * K;
            out += P::kSlice;
            if (more) {
                if (sizeof(State) == 4) load_state();
                if constexpr (!kShared) load_value();
            }
        }
    }

    __device__ inline void store_zeros(int tokens) {
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++)
#pragma unroll 1
            for (int t = 0; t < tokens; t++)
                if (writes) store_output(p, out + pass * P::kSlice + t * p.o.token_stride, 0.f);
    }

    __device__ inline int first_column() const { return blockIdx.x * passes * P::kSlice; }

    // Of the one token's v, and moves on to that of the next pass.
    __device__ inline void load_value() {
        own_value = load_bits(p.v.data, p.v.dtype, value);
        value += P::kSlice;
    }

    __device__ inline void load_state() {
        if (goes_on || p.before.data != nullptr) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++) words[r][w] = load_four(from + r * P::kSide * K + w * L * 4);
        } else {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++) words[r][w] = {};
        }
        from += P::kSlice * K;
    }

    __device__ inline void store_between(const float (&s)[R][W][4], int slot, int t) {
        const int its = slot_of(p.slots, blockIdx.z, start + t);
        if (its >= 0) store_state(s, to + static_cast<std::int64_t>(its - slot) * p.after.slot_stride);
    }

    __device__ inline void store_state(const float (&s)[R][W][4], State* to) {
        if (p.after.data != nullptr) {
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int w = 0; w < W; w++)
                    store_four(to + r * P::kSide * K + w * L * 4, narrow<State>(s[r][w]));
        }
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
            u = prepared.v[t][pass * P::kSlice + own - first_column()];
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
