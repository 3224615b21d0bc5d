// The gate side of mLSTM: three numbers per token, scanned ahead of the GEMMs by a warp, at K = 256 by two
// one after the other, in the states pass by three in turns.
//
// Notation of the TFLA papers, in log2 units: b_t = cumsum(log f) in the chunk, a_j = log i_j - b_j,
// M_t = max(m_in, max_{j <= t} a_j), m_t = b_t + M_t. Sums are pairs of floats, in which gates of +-1e4
// cancel to 1e-8; fp64 would do, but its instructions wait for the tensor cores. The GEMM side sees pairs
// and differences.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kittens.cuh"
#include "tfla_tk/float_pair.cuh"
#include "tfla_tk/gate_policy.cuh"
#include "tfla_tk/params.h"
#include "tfla_tk/sync.cuh"

namespace tfla_tk {

constexpr int kChunk = 64;  // tokens per chunk (L)
constexpr double kLn2 = 0.6931471805599453;

// What the GEMM warpgroups and the warp of n read of one chunk. P_tj = S_tj 2^{(column_j.x - row_t) +
// column_j.y}, S unscaled.
struct alignas(16) GateStage {
    float2 column[kChunk];  // a_j + log2(scale) as high and low part
    float row[kChunk];      // M_t rounded up to fp32: the stabiliser that the row really uses
    float inter[kChunk];    // scale 2^{m_in - row_t}, of q C_in, times what is owed of C_in's decay
    // with m_t = row_t + b_t: 2^{-m_t}, lower bound of |q n| (exponential), or 2^{m_t}, a factor of the row's
    // output (sigmoid)
    float unit[kChunk];
    // 2^{a_j - M_L} (exponential) or 2^{a_j + b_L} (sigmoid), over what is owed then: of k_j in the state
    float key_scale[kChunk];
    float decay;  // of the state, 1 where it is owed
};

// A score of the chunk's P, from GateStage::column and GateStage::row.
// kInPlace: NOTES: ptxas computes only what is visible, into a register beside the score's; this way into the
// score's, always, which costs 0.4 % of the forward at K = 256.
template <bool kInPlace = false>
__device__ inline float gated(float score, float high, float low, float row, bool visible) {
    if constexpr (!kInPlace) return visible ? score * exp2f((high - row) + low) : 0.f;
    float p = score * exp2f((high - row) + low);
    asm("{\n"
        ".reg .pred visible;\n"
        "setp.ne.s32 visible, %1, 0;\n"
        "selp.f32 %0, %0, 0f00000000, visible;\n"
        "}\n"
        : "+f"(p)
        : "r"(static_cast<int>(visible)));
    return p;
}

__device__ inline float load_gate(const Gate& gate, int64_t offset) {
    switch (gate.dtype) {
        case DType::bfloat16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(gate.data)[offset]);
        case DType::float16:
            return __half2float(static_cast<const __half*>(gate.data)[offset]);
        default:
            return static_cast<const float*>(gate.data)[offset];
    }
}

// The gates of one (batch, head) from a row on.
struct GateRows {
    const Gate& gate;
    int64_t offset;

    __device__ inline GateRows(const Gate& gate, int batch, int head, int row)
        : gate(gate), offset(batch * gate.batch_stride + head * gate.head_stride + row * gate.row_stride) {}

    __device__ inline float operator[](int t) const { return load_gate(gate, offset + t * gate.row_stride); }

    // This lane's two tokens of a chunk; `none` past `tokens`.
    __device__ inline float2 pair(int chunk, int tokens, float none) const {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        return {t < tokens ? (*this)[t] : none, t + 1 < tokens ? (*this)[t + 1] : none};
    }
};

// A Gate as GateStream reads it: strides in bytes, and how a word of 32 bits that has a number of it becomes
// one. NOTES: made on the host: the constant bank costs a lone warp no instructions and no registers.
struct GateWords {
    const char* data;
    int64_t batch_bytes, head_bytes, row_bytes, chunk_bytes;
    // Selectors of __byte_perm, 4 is a byte of zeros: of a number at the word's start, and what is added for
    // one a byte later. fp32 all four bytes; bf16 its two as the upper half, fp16 as the lower one.
    uint32_t bytes, a_byte_later;
    bool is_half;

    __host__ explicit GateWords(const Gate& gate)
        : data(static_cast<const char*>(gate.data)), is_half(gate.dtype == DType::float16) {
        const bool is_float = gate.dtype == DType::float32;
        const int64_t size = is_float ? 4 : 2;
        batch_bytes = gate.batch_stride * size, head_bytes = gate.head_stride * size;
        row_bytes = gate.row_stride * size, chunk_bytes = kChunk * row_bytes;
        bytes = is_float ? 0x3210 : is_half ? 0x4410 : 0x1044;
        a_byte_later = is_half ? 0x11 : 0x1100;
    }
};

// A gate's pre-activations of the lane's two tokens of chunk after chunk, loaded a chunk before they are
// taken. NOTES: a load is waited for where its register is converted, or moved, as behind a branch it is. So
// words are loaded, whatever is in them, and converted when they are taken. With a number of 16 bits comes
// its neighbour, of a tensor's last one what lies behind it in the same word.
struct GateStream {
    const GateWords& gate;
    const char* at;  // the first of the two tokens whose words are here
    uint32_t first = 0, second = 0;

    __device__ inline GateStream(const GateWords& gate, int batch, int head, int row, int tokens)
        : gate(gate) {
        const int t = 2 * fresh_laneid();
        at = gate.data + batch * gate.batch_bytes + head * gate.head_bytes + (row + t) * gate.row_bytes;
        load(t, tokens);
    }

    // `none` past `tokens`; starts to load the next chunk's.
    __device__ inline float2 take(int chunk, int tokens, float none) {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        const float2 taken{t < tokens ? number(first, at) : none,
                           t + 1 < tokens ? number(second, at + gate.row_bytes) : none};
        at += gate.chunk_bytes;
        load(t + kChunk, tokens);
        return taken;
    }

  private:
    __device__ inline void load(int t, int tokens) {
        auto load_word = [&](uint32_t& word, const char* at, int t) {
            const uintptr_t address = reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3};
            asm volatile("{.reg .pred p; setp.lt.s32 p, %2, %3; @p ld.global.nc.b32 %0, [%1];}"
                         : "+r"(word)
                         : "l"(address), "r"(t), "r"(tokens));
        };
        load_word(first, at, t), load_word(second, at + gate.row_bytes, t + 1);
    }
    __device__ inline float number(uint32_t word, const char* at) const {
        const auto byte = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) & 2;  // 0 or 2
        const uint32_t bits = __byte_perm(word, 0, gate.bytes + byte * gate.a_byte_later);
        const float of_half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        return gate.is_half ? of_half : __uint_as_float(bits);
    }
};

// 2^x is 0 in fp32.
constexpr float kNothing = -150.f;

// 2^x, rounded to 0 below 2^-150.
__device__ inline float exp2_of(double x) { return exp2f(static_cast<float>(x)); }

template <class X> __device__ inline X warp_inclusive_sum(X x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const X other = __shfl_up_sync(0xffffffff, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// Of numbers of one sign. Low parts collect what high parts round off, and only the end waits for them.
__device__ inline FloatPair warp_inclusive_sum(FloatPair x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float high = __shfl_up_sync(0xffffffff, x.high, step);
        const float low = __shfl_up_sync(0xffffffff, x.low, step);
        const FloatPair sum = two_sum(x.high, high);
        if (lane >= step) x = {sum.high, __fadd_rn(__fadd_rn(x.low, low), sum.low)};
    }
    return fast_two_sum(x.high, x.low);
}

__device__ inline float warp_inclusive_max(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_up_sync(0xffffffff, x, step));
    return x;
}

// w of a row, max(|d|, floor) + eps. NaN of d stays, as n beyond the range of fp16 is one: fmaxf drops it.
__device__ inline float row_normaliser(float d, float floor, float eps) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(d)), "f"(floor));
    return larger + eps;
}

// fmax without its care for NaN, which costs registers.
__device__ inline double larger(double x, double y) { return x > y ? x : y; }

// A float's bits as an integer that sorts as the float does, NaN above all; its own inverse.
__device__ inline int sortable(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The largest x and y of the warp, or NaN if one of them is.
__device__ inline float warp_max(float x, float y) {
    const int own = max(sortable(__float_as_int(x)), sortable(__float_as_int(y)));
    return __int_as_float(sortable(__reduce_max_sync(0xffffffff, own)));
}
__device__ inline float warp_max(float x) { return warp_max(x, x); }
__device__ inline FloatPair warp_max(FloatPair x, FloatPair y) {
    const float high = warp_max(x.high, y.high);
    auto low = [&](FloatPair x) { return x.high == high ? x.low : -INFINITY; };
    return {high, warp_max(fmaxf(low(x), low(y)))};
}

template <class X> __device__ inline X warp_sum(X x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

__device__ inline FloatPair warp_sum(FloatPair x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float high = __shfl_xor_sync(0xffffffff, x.high, step);
        const float low = __shfl_xor_sync(0xffffffff, x.low, step);
        x = x + FloatPair{high, low};
    }
    return x;
}

__device__ inline FloatPair of_last_lane(FloatPair x) {
    return {__shfl_sync(0xffffffff, x.high, 31), __shfl_sync(0xffffffff, x.low, 31)};
}

// As GateStage::column holds them, of the lane's two tokens.
__device__ inline void write_pairs(float2* to, FloatPair x, FloatPair y) {
    *reinterpret_cast<float4*>(to) = {x.high, x.low, y.high, y.low};
}

// M_t of the lane's two tokens, rounded up to fp32.
__device__ inline float2 rounded_up_maxima(FloatPair a_x, FloatPair a_y, FloatPair m_in, int lane) {
    const float up_x = fmaxf(rounded_up(a_x), rounded_up(m_in));
    const float up_y = fmaxf(rounded_up(a_y), up_x);
    const float row_y = warp_inclusive_max(up_y);
    const float before = __shfl_up_sync(0xffffffff, row_y, 1);
    return {lane == 0 ? up_x : fmaxf(before, up_x), row_y};
}

// A stabiliser as it is stored, log2 units. -inf, of a state without weight, becomes a number as good.
// NOTES: a cast would flush subnormals, by a comparison in fp64.
__device__ inline FloatPair finite_stabiliser(double m) {
    constexpr float kLeast = -1e30f;
    auto rounded = [](double x) {
        float y;
        asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
        return y;
    };
    const float high = rounded(m), low = rounded(m - static_cast<double>(high));
    return high < kLeast ? FloatPair{kLeast} : FloatPair{high, low};
}

// Stabilisers of chunks, as the forward leaves them for the backward. NOTES: pairs, not fp64: the forward's
// conversion waited for the tensor cores, 11 us of 625 at 256/512.
__device__ inline void store_chunk_m(float* chunk_m, int64_t at, FloatPair m) {
    reinterpret_cast<float2*>(chunk_m)[at] = {m.high, m.low};
}
__device__ inline FloatPair load_chunk_m(const float* chunk_m, int64_t at) {
    const float2 m = reinterpret_cast<const float2*>(chunk_m)[at];
    return {m.x, m.y};
}

// Of a lane's two tokens of a chunk, 2 lane and 2 lane + 1.
struct alignas(16) TwoPairs {
    FloatPair x, y;
};

// log2 of the forget gates of pre-activations.
template <class P> __device__ inline TwoPairs log2_forget(float2 f) {
    return {P::log2_forget(f.x), P::log2_forget(f.y)};
}

// b, the sums of log2_forget over the chunk's tokens.
__device__ inline TwoPairs sum_forget(const TwoPairs& log_f, int lane) {
    const FloatPair b_y = warp_inclusive_sum(log_f.x + log_f.y, lane);
    return {b_y - log_f.y, b_y};
}

// a. i: pre-activations.
template <class P> __device__ inline TwoPairs input_over_forget(float2 i, const TwoPairs& b) {
    return {P::log2_input(i.x) - b.x, P::log2_input(i.y) - b.y};
}

// The decay of a state in registers may be owed for some chunks, while what reads the state is scaled with
// the debt and what is added to it with its inverse: a multiplication of the whole state falls due only when
// the debt passes 2^kLargestDebt. fp16 has no range for a state in other units.
template <class T> constexpr float kLargestDebt = std::is_same_v<T, kittens::bf16> ? 32.f : 0.f;

template <class T> struct OwedDecay {
    static constexpr bool kFollowsWeights = false, kRunsAhead = false;
    float log2 = 0.f;

    OwedDecay() = default;
    __device__ inline explicit OwedDecay(bool) {}  // whether a state is given

    // Adds a chunk's decay, log2. Returns what the state is to be multiplied with: 1 while it is owed.
    // settle: nothing may be owed after this chunk. NOTES: little is owed where the decay is slow: a large
    // debt would round off the same from each of many small ones.
    __device__ inline float add(float decay, bool settle) {
        log2 += decay;
        const float most = decay > -1.f ? fminf(kLargestDebt<T>, 4.f) : kLargestDebt<T>;
        if (!settle && log2 >= -most) return 1.f;
        const float due = exp2f(log2);
        log2 = 0.f;
        return due;
    }
};

// Walks the chunks of one head, by one warp: lane l owns tokens 2 l and 2 l + 1 of a chunk. Owed: the units
// that the state is in, whose `log2` is to be 0 after the last chunk unless they follow the weights.
template <class T, class P, class Owed = OwedDecay<T>> struct GateScan {
    FloatPair m;  // stabiliser at the chunk's start, log2 units; stays 0 with the sigmoid gate
    Owed owed{};

    // i, f: pre-activations of the lane's two tokens, replaced by next_i(), next_f() as soon as they are
    // read, so that loads there are in flight over the scan. last: of the walk. Returns the tokens' m_t.
    template <class NextI, class NextF>
    __device__ inline float2 chunk(GateStage& out, float2& i, float2& f, float scale, FloatPair log2_scale,
                                   bool last, NextI next_i, NextF next_f) {
        const int lane = fresh_laneid();
        const TwoPairs log_f = log2_forget<P>(f);
        f = next_f();
        const TwoPairs b = sum_forget(log_f, lane);
        const float2 taken_i = i;
        i = next_i();
        const TwoPairs a = input_over_forget<P>(taken_i, b);
        return finish(out, b, a, scale, log2_scale, last);
    }

    // The part of it that needs the chunks before. b, a: of the lane's two tokens.
    __device__ inline float2 finish(GateStage& out, const TwoPairs& b, const TwoPairs& a, float scale,
                                    FloatPair log2_scale, bool last) {
        const int lane = fresh_laneid();
        auto write_pair = [&](float (&values)[kChunk], float x, float y) {
            *reinterpret_cast<float2*>(&values[2 * lane]) = {x, y};
        };
        write_pairs(&out.column[2 * lane], a.x + log2_scale, a.y + log2_scale);
        const auto [row_x, row_y] = rounded_up_maxima(a.x, a.y, m, lane);
        const auto m_x = static_cast<float>(b.x + row_x), m_y = static_cast<float>(b.y + row_y);
        write_pair(out.row, row_x, row_y);
        auto inter = [&](float row) { return scale * exp2f(rounded_sum(m, -row) + owed.log2); };
        write_pair(out.inter, inter(row_x), inter(row_y));
        write_pair(out.unit, exp2f(P::kStabilised ? -m_x : m_x), exp2f(P::kStabilised ? -m_y : m_y));
        // The state's gates are relative to the chunk's end.
        const FloatPair b_end = of_last_lane(b.y);
        const FloatPair a_max = !P::kStabilised && !Owed::kFollowsWeights ? FloatPair{} : warp_max(a.x, a.y);
        const FloatPair m_max = P::kStabilised ? larger(m, a_max) : FloatPair{};
        const FloatPair end = P::kStabilised ? -m_max : b_end;
        float decay = rounded_sum(m, end);
        if constexpr (Owed::kFollowsWeights)
            decay = owed.add(decay, rounded_sum(a_max, end));
        else
            decay = owed.add(decay, last);
        if (lane == 0) out.decay = decay;
        auto key_scale = [&](FloatPair a) { return exp2f(rounded_sum(a, end) - owed.log2); };
        write_pair(out.key_scale, key_scale(a.x), key_scale(a.y));
        if constexpr (P::kStabilised) m = b_end + m_max;
        constexpr auto kNaturalLog = static_cast<float>(kLn2);
        return {m_x * kNaturalLog, m_y * kNaturalLog};
    }
};

// A segment walked backward in time, up to a chunk. All in log2 units.
template <class P> struct SuffixSum {
    FloatPair decay{};                        // of the tokens walked so far, together
    float m = P::kStabilised ? -1e30f : 0.f;  // no less than any weight so far; stays 0 with the sigmoid gate

    // Whether earlier tokens, whose input gates are `largest` at most, can add nothing.
    __device__ inline bool forgets(float largest) const {
        return rounded_sum(decay, largest - m) <= kNothing;
    }
};

// What is read of one chunk of such a walk, by the GEMM warpgroups and by the warp that scans the next one.
struct alignas(16) SuffixStage {
    float key_scale[kChunk];  // of k_j in the state at the segment's end, relative to the running maximum
    float rescale;            // of the sum so far, to the new maximum
    bool last;                // no earlier chunk can add anything
    FloatPair decay;          // of SuffixSum, with this chunk
    float m;
};

// One chunk of such a walk, by one warp: lane l owns tokens 2 l and 2 l + 1.
template <class P> struct SuffixChunk {
    FloatPair decay, w_x, w_y;  // of the chunk, and the weights at its end of the lane's tokens

    __device__ inline SuffixChunk(float2 i, float2 f) {
        const FloatPair log_f_x = P::log2_forget(f.x), log_f_y = P::log2_forget(f.y);
        const FloatPair b_y = warp_inclusive_sum(log_f_x + log_f_y, fresh_laneid()), b_x = b_y - log_f_y;
        decay = of_last_lane(b_y);
        w_x = P::log2_input(i.x) + (decay - b_x);
        w_y = P::log2_input(i.y) + (decay - b_y);
    }

    // sum: of the chunks walked before, then with this one.
    __device__ inline void write(SuffixStage& out, SuffixSum<P>& sum) const {
        const FloatPair x = w_x + sum.decay, y = w_y + sum.decay;
        const float before = sum.m;
        if constexpr (P::kStabilised) sum.m = warp_max(fmaxf(before, fmaxf(rounded_up(x), rounded_up(y))));
        sum.decay = decay + sum.decay;
        const int lane = fresh_laneid();
        *reinterpret_cast<float2*>(&out.key_scale[2 * lane]) = {exp2f(rounded_sum(x, -sum.m)),
                                                                exp2f(rounded_sum(y, -sum.m))};
        if (lane == 0) out.rescale = exp2f(before - sum.m), out.decay = sum.decay, out.m = sum.m;
    }
};

// Of all tokens of a segment: log2 of their decay, and the largest log2 input gate.
struct SegmentGates {
    FloatPair decay{};
    float largest = -1e30f;  // rounded up

    // Adds the tokens from `first` on in steps of `stride`, this lane's part. A NaN among them shows in the
    // decay.
    template <class P>
    __device__ inline void add(const GateRows& i, const GateRows& f, int first, int stride, int tokens) {
        constexpr int kBatch = 8;  // loads in flight
        for (int t = first; t < tokens; t += kBatch * stride) {
            float gates[kBatch][2];
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const bool exists = t + n * stride < tokens;
                gates[n][0] = P::input([&](float none) { return exists ? i[t + n * stride] : none; });
                gates[n][1] = P::forget([&](float none) { return exists ? f[t + n * stride] : none; });
            }
#pragma unroll
            for (int n = 0; n < kBatch; n++) {
                const float log_i = rounded_up(P::log2_input(gates[n][0]));
                decay = decay + (P::log2_forget(gates[n][1]) + 0.f * log_i);
                largest = fmaxf(largest, log_i);
            }
        }
    }
};

}  // namespace tfla_tk
