// The tokens of a call as all rows of a state use them: keys, queries, decays and writing strengths.
#pragma once

#include "decode/config.cuh"
#include "decode/numbers.cuh"
#include "decode/sums.cuh"

namespace tfla_tk::decode {

// A batch entry's tokens from one of them on: by which batch and number that one is found, and how many there
// are.
struct Entry {
    int batch, first, tokens;

    __device__ inline Entry(const DecodeParams& p, int entry, int start)
        : batch(entry), first(start), tokens(p.tokens - start) {
        if (p.offsets == nullptr) return;
        const int begin = offset(p, entry);
        batch = 0, first = begin + start, tokens = offset(p, entry + 1) - first;
    }
    __device__ static inline int offset(const DecodeParams& p, int n) {
        return p.offsets_are_64bit ? static_cast<int>(static_cast<const std::int64_t*>(p.offsets)[n])
                                   : static_cast<const int*>(p.offsets)[n];
    }
};

// The slot in a column of an entry's row; -1 where there is no state.
__device__ inline int slot_of(const Slots& s, int entry, int column) {
    if (column < 0 || column >= s.columns) return -1;
    const int slot = s.data[entry * s.stride + column];
    return slot < s.first ? -1 : slot;
}

// That of the state before the token `start` of an entry.
__device__ inline int slot_before(const Slots& s, int entry, int start) {
    if (s.data == nullptr) return entry;
    if (s.every && start > 0) return slot_of(s, entry, start - 1);
    return slot_of(s, entry, s.accepted != nullptr ? s.accepted[entry] - 1 : 0);
}

// A turn takes up to so many tokens: it reads the state before them and writes the one behind them.
template <class C> __device__ inline int tokens_of_turn(const DecodeParams& p) {
    return p.slots.every ? 1 : C::kTokens;
}

// In shared memory. A warp of V-first that takes one token has v in registers.
template <class C> struct alignas(16) Tokens {
    static constexpr bool kChannel = C::kByChannel;
    static constexpr bool kHasValues = C::kLayout == Layout::k_first || C::kTokens > 1;
    static constexpr int kValues = kHasValues ? C::kMostPasses * C::kSlice : 4;
    float k[C::kTokens][C::K], q[C::kTokens][C::K];  // by Part::place
    float channel[kChannel ? C::kTokens : 1][kChannel ? C::K : 4];
    float v[C::kTokens][kValues];
    float decay[C::kTokens], beta[C::kTokens], key_query[C::kTokens];
};

// FLA's softplus.
__device__ inline float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// A token in the registers of a warp: lane l has the keys l, l + 32, .. Loading it and making it ready are
// two steps, since the loads of the state come in between.
template <class C> struct RawToken {
    static constexpr int N = C::K / 32;
    static constexpr bool kChannel = C::kByChannel;
    static constexpr int kGates = kChannel ? N : 1;
    static constexpr bool kHasValues = Tokens<C>::kHasValues;
    static constexpr int kLoads = kHasValues ? Tokens<C>::kValues / 32 : 1;
    unsigned k[N], q[N], g[kGates], v[kLoads], beta, a_log, dt_bias;

    // first, columns: of V, those that the CTA takes.
    __device__ inline void load(const DecodeParams& p, const Entry& entry, int number, int value_head,
                                int first, int columns, int lane) {
        const int head = value_head / (p.value_heads / p.heads);
        const int batch = entry.batch, token = entry.first + number;
        if constexpr (kHasValues) {
            const std::int64_t at = start_of(p.v, batch, token, value_head) + first + lane;
#pragma unroll
            for (int n = 0; n < kLoads; n++)
                if (lane + n * 32 < columns) v[n] = load_bits(p.v.data, p.v.dtype, at + n * 32);
        }
        load_bits(k, p.k.data, p.k.dtype, start_of(p.k, batch, token, head) + lane);
        load_bits(q, p.q.data, p.q.dtype, start_of(p.q, batch, token, head) + lane);
        if (p.g.data != nullptr) {
            const std::int64_t at = start_of(p.g, batch, token, value_head);
            if constexpr (kChannel)
                load_bits(g, p.g.data, p.g.dtype, at + lane);
            else
                g[0] = load_bits(p.g.data, p.g.dtype, at);
            if (!kChannel && p.gate != LogDecay::log) {
                a_log = load_bits(p.a_log.data, p.a_log.dtype, value_head);
                if (p.dt_bias.data != nullptr)
                    dt_bias = load_bits(p.dt_bias.data, p.dt_bias.dtype, value_head);
            }
        }
        if constexpr (C::kDelta)
            beta = load_bits(p.beta.data, p.beta.dtype, start_of(p.beta, batch, token, value_head));
    }

    __device__ inline float scalar_decay(const DecodeParams& p) const {
        if (p.g.data == nullptr) return 1.f;
        float log = number_of(g[0], p.g.dtype);
        if (p.gate != LogDecay::log) {
            if (p.dt_bias.data != nullptr) log = __fadd_rn(log, number_of(dt_bias, p.dt_bias.dtype));
            log = -__fmul_rn(expf(number_of(a_log, p.a_log.dtype)), softplus(log));
        }
        return expf(log);
    }
    // Of the lane's n-th channel. NOTES: what raw gates take is loaded here, since registers are few while
    // the state comes.
    __device__ inline float channel_decay(const DecodeParams& p, int n, int value_head, int lane) const {
        float log = number_of(g[n], p.g.dtype);
        if (C::kDelta && p.gate != LogDecay::log) {
            auto parameter = [&](const PerHead& x, std::int64_t at) {
                return x.data == nullptr ? 0.f : number_of(load_bits(x.data, x.dtype, at), x.dtype);
            };
            const float rate = expf(parameter(p.a_log, value_head));
            log = __fadd_rn(log, parameter(p.dt_bias, std::int64_t{value_head} * C::K + lane + n * 32));
            if (p.gate == LogDecay::sigmoid)
                log = __fdividef(p.lower_bound, __fadd_rn(1.f, expf(-__fmul_rn(rate, log))));
            else
                log = -__fmul_rn(rate, softplus(log));
        }
        return expf(log);
    }
    __device__ inline float strength(const DecodeParams& p) const {
        const float x = number_of(beta, p.beta.dtype);
        const float once = p.beta_sigmoid ? __fdividef(1.f, __fadd_rn(1.f, expf(-x))) : x;
        return p.beta_double ? __fadd_rn(once, once) : once;
    }

    __device__ inline void finish(const DecodeParams& p, Tokens<C>& to, int token, int value_head,
                                  int columns, int lane) const {
        if constexpr (kHasValues) {
#pragma unroll
            for (int n = 0; n < kLoads; n++)
                if (lane + n * 32 < columns) to.v[token][lane + n * 32] = number_of(v[n], p.v.dtype);
        }
        float key[N], query[N], keys = 0.f, queries = 0.f, both = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            key[n] = number_of(k[n], p.k.dtype), query[n] = number_of(q[n], p.q.dtype);
            keys = __fmaf_rn(key[n], key[n], keys), queries = __fmaf_rn(query[n], query[n], queries);
        }
        float of_key = 1.f, of_query = p.scale;
        if (p.l2norm) {
            of_key = rsqrtf(__fadd_rn(sum_of_warp(keys), 1e-6f));
            of_query = __fmul_rn(p.scale, rsqrtf(__fadd_rn(sum_of_warp(queries), 1e-6f)));
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            key[n] = __fmul_rn(key[n], of_key), query[n] = __fmul_rn(query[n], of_query);
            both = __fmaf_rn(key[n], query[n], both);
            const int place = C::Part::place(lane + n * 32);
            to.k[token][place] = key[n], to.q[token][place] = query[n];
            if constexpr (kChannel) to.channel[token][place] = channel_decay(p, n, value_head, lane);
        }
        both = sum_of_warp(both);
        if (lane == 0) {
            to.key_query[token] = both;
            if constexpr (!kChannel) to.decay[token] = scalar_decay(p);
            if constexpr (C::kDelta) to.beta[token] = strength(p);
        }
    }
};

// Keys and queries of four neighbouring channels, with their decay. S^T k and S^T q of the decayed state are
// sums over the state as it is: the decay is multiplied into k and q, so that the state changes once per
// token.
template <class C> struct Channels {
    float k[4], decay[4], decayed_k[4], decayed_q[4];

    __device__ inline Channels(const Tokens<C>& tokens, int t, int place) {
        float q[4];
        widen<float>(k, *reinterpret_cast<const float4*>(&tokens.k[t][place]));
        widen<float>(q, *reinterpret_cast<const float4*>(&tokens.q[t][place]));
        if constexpr (C::kByChannel)
            widen<float>(decay, *reinterpret_cast<const float4*>(&tokens.channel[t][place]));
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if constexpr (!C::kByChannel) decay[e] = tokens.decay[t];
            decayed_k[e] = __fmul_rn(k[e], decay[e]), decayed_q[e] = __fmul_rn(q[e], decay[e]);
        }
    }
};

// A number of the state decays and gets k u.
__device__ inline void decay_and_add(float& number, float decay, float k, float u) {
    number = __fmaf_rn(number, decay, __fmul_rn(k, u));
}

// A state of 16 bits is rounded after each token, as T calls of one token would.
template <class C> __device__ inline void round_between_tokens(float (&s)[4]) {
    using State = typename C::State;
    if constexpr (C::kTokens > 1 && sizeof(State) < 4) widen<State>(s, narrow<State>(s));
}

}  // namespace tfla_tk::decode
