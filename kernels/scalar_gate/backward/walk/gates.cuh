// Gates of the backward's walks: per chunk as mlstm_bwd_scan stores them for all three walks (ChunkGates), as
// the gate warp of a walk prepares them ahead of the GEMMs (PassStage), and as the segment sums use them
// (SegmentStage).
//
// With b, a, M and m_in of gate/gates.cuh, in log2 units, token j contributes to token t with the weight
//     s W_tj / w_t = 2^{sends_j - receives_t}
//         sends_j = a_j + log2 s        receives_t = M_t + log2 w_t
// The state contributes to t with s 2^{m_in - receives_t}, and j is added to the state with 2^{a_j - M_L},
// both times the deferred decay of the state (DeferredDecay). The forward has saved m_in of each chunk, so
// chunks can be scanned in any order. Gates without stabiliser have m_in = 0, receives_t = log2 w_t - b_t,
// and b_L in place of -M_L.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk {

constexpr int kMostSlices = 4;  // of K in a pass for dq or dk
constexpr int kMostKeys = 256;  // columns of keys of one share

// One chunk's gates, before the deferred decay of a walk's state is applied.
struct alignas(16) ChunkGates {
    float2 sends[kChunk], receives[kChunk];  // as high and low part
    float sent[kChunk], received[kChunk];    // 2^{a_j - M_L} and s 2^{m_in - receives_t}
    float decay;                             // log2 of the factor on the state
    int stored[2][kMostSlices];              // per slice: how many shares have stored dq and dk
};

}  // namespace tfla_tk

namespace tfla_tk::mlstm {

// log2. In a chunk of 64 tokens that decays by less, the part of the row sums through the entering state is
// not computed (gate_gradients.cuh). Its squares are extrapolated from 16 tokens, as if every token had the
// same decay.
constexpr float kSlowDecay = -12.f;
__device__ inline float squares_of_all(float decay) {
    const float fading = exp2f(.5f * decay);  // decay of the squares over 16 tokens
    return (1.f + fading) * (1.f + fading * fading);
}

// Scaling of two tokens' values. In bf16 a scale is a high and a low part, so that two instructions scale and
// round both values. fp16 has too few digits for small scales, so there scaling is in fp32.
template <class T2> struct PairOfScales {
    float2 scales;

    __device__ inline static PairOfScales of(float2 scales) { return {scales}; }
    __device__ inline T2 scaled(T2 x) const {
        const float2 values = to_float2(x);
        return from_float2<T2>({values.x * scales.x, values.y * scales.y});
    }
};
template <> struct PairOfScales<kittens::bf16_2> {
    using T2 = kittens::bf16_2;
    T2 high, low;

    __device__ inline static PairOfScales of(float2 scales) {
        const HighAndLow<T2> parts(scales);
        return {parts.high, parts.low};
    }
    __device__ inline T2 scaled(T2 x) const { return __hfma2(x, high, __hmul2(x, low)); }
};

// One chunk's gates as the GEMM warpgroups read them.
template <class T2> struct alignas(16) PassStage {
    float2 sends[kChunk], receives[kChunk];  // as high and low part
    float e[kChunk];                         // added to the scores of t
    float query_scale[kChunk];               // factor on what a query reads from the state
    PairOfScales<T2> key_scale[kChunk / 2];  // factor on what a key adds to the state
    float decay;                             // factor on the state and on n; 1 where the decay is deferred
    float slow;                              // squares_of_all of a slow chunk; else 0
};

// s W_tj / w_t of a score.
__device__ inline float pass_gate(float2 sends, float2 receives) {
    return exp2f((sends.x - receives.x) + (sends.y - receives.y));
}

__device__ inline void write_lane_pair(float (&values)[kChunk], float x, float y) {
    *reinterpret_cast<float2*>(&values[2 * fresh_laneid()]) = {x, y};
}

// Scans one chunk, by one warp; lane l has tokens 2 l and 2 l + 1. i, f: their gates as stored. m_in: the
// chunk's.
template <class P> struct ScannedGates {
    TwoPairs b, a;  // of the lane's tokens
    FloatPair end;  // b_L or -M_L

    __device__ inline ScannedGates(float2 i, float2 f, FloatPair m_in, int lane) {
        b = inclusive_sums(log2_forget<P>(f), lane), a = input_over_forget<P>(i, b);
        end = P::kStabilised ? -larger(m_in, warp_max(a.x, a.y)) : of_last_lane(b.y);
    }
};

// Writes ChunkGates of one chunk. log2_w: of the lane's tokens; other arguments as in ScannedGates.
template <class P>
__device__ inline void scan_chunk(ChunkGates& out, float2 i, float2 f, FloatPair m_in, float2 log2_w,
                                  float scale, FloatPair log2_scale) {
    const int lane = fresh_laneid();
    const auto [b, a, end] = ScannedGates<P>(i, f, m_in, lane);
    FloatPair receives_x, receives_y;
    if constexpr (!P::kStabilised) {
        receives_x = {-b.x.high, log2_w.x - b.x.low}, receives_y = {-b.y.high, log2_w.y - b.y.low};
    } else {  // M_t rounded up, as in the forward
        const float2 rows = rounded_up_maxima(a.x, a.y, m_in, lane);
        receives_x = {rows.x, log2_w.x}, receives_y = {rows.y, log2_w.y};
    }
    write_pairs(&out.sends[2 * lane], a.x + log2_scale, a.y + log2_scale);
    write_pairs(&out.receives[2 * lane], receives_x, receives_y);
    auto sent = [&, end = end](FloatPair a) { return exp2f(rounded_sum(a, end)); };
    auto received = [&](FloatPair receives) { return scale * exp2f(rounded_sum(m_in, -receives)); };
    write_lane_pair(out.sent, sent(a.x), sent(a.y));
    write_lane_pair(out.received, received(receives_x), received(receives_y));
    if (lane == 0) out.decay = rounded_sum(m_in, end);
    constexpr int kStored = sizeof(out.stored) / sizeof(int);
    if (lane < kStored) out.stored[lane / kMostSlices][lane % kMostSlices] = 0;
}

// ChunkGates and e of the lane's tokens 2 l and 2 l + 1, between their load and PassStage.
struct LaneGates {
    float4 sends, receives;
    float2 sent, received, e;
    float decay;

    __device__ inline LaneGates(const ChunkGates& chunk, float2 e) : e(e) {
        const int lane = fresh_laneid();
        sends = reinterpret_cast<const float4*>(chunk.sends)[lane];
        receives = reinterpret_cast<const float4*>(chunk.receives)[lane];
        sent = reinterpret_cast<const float2*>(chunk.sent)[lane];
        received = reinterpret_cast<const float2*>(chunk.received)[lane];
        decay = chunk.decay;
    }

    // Writes PassStage. owed: the state's deferred decay; settle: defer nothing beyond this chunk. whole: the
    // chunk has 64 tokens. Returns key_scale of the lane's tokens.
    template <bool kBackward, class T, class T2>
    __device__ inline float2 write(PassStage<T2>& out, DeferredDecay<T>& owed, bool settle,
                                   bool whole) const {
        const float debt_before = owed.log2, due = owed.add(decay, settle);
        const int lane = fresh_laneid();
        if (lane == 0) {
            out.decay = due;
            out.slow = whole && decay > kSlowDecay ? squares_of_all(decay) : 0.f;
        }
        // the state is read before its decay is applied, and added to after
        const float of_sent = exp2f(kBackward ? debt_before : -owed.log2);
        const float of_received = exp2f(kBackward ? -owed.log2 : debt_before);
        const float2 sends_state{sent.x * of_sent, sent.y * of_sent};
        const float2 gets_state{received.x * of_received, received.y * of_received};
        const float2 query = kBackward ? sends_state : gets_state, key = kBackward ? gets_state : sends_state;
        reinterpret_cast<float4*>(out.sends)[lane] = sends;
        reinterpret_cast<float4*>(out.receives)[lane] = receives;
        write_lane_pair(out.e, e.x, e.y);
        write_lane_pair(out.query_scale, query.x, query.y);
        out.key_scale[lane] = PairOfScales<T2>::of(key);
        return key;
    }
};

// One chunk of the segment sums, as the state warpgroups and the warp that scans the next chunk read it.
struct alignas(16) SegmentStage {
    float key_scale[kChunk], norm_key[kChunk];  // factors of a key in the state and in n at the boundary
    bool last;                                  // no chunk further away can add anything
    FloatPair decay;                            // log2, of the chunks walked so far together
};

// Scans one chunk of a segment that is walked away from a boundary, by one warp; lane l has tokens 2 l and 2
// l + 1. Scales are those of ChunkGates times the decay between the chunk and the boundary.
template <class P, bool kBackward> struct SegmentChunk {
    FloatPair decay;   // log2, of the chunk
    FloatPair x, y;    // log2 of the scales of the lane's tokens, without the decay to the boundary
    float2 log2_w, e;  // of the lane's tokens; used backward in time: the scale is over w, and n's is times e

    // i, f: gates of the lane's two tokens as stored. m_in: the chunk's.
    __device__ inline SegmentChunk(float2 i, float2 f, float2 log2_w, float2 e, FloatPair m_in)
        : log2_w(log2_w), e(e) {
        const int lane = fresh_laneid();
        const auto [b, a, end] = ScannedGates<P>(i, f, m_in, lane);
        decay = m_in + end;
        if constexpr (!kBackward) {
            x = a.x + end, y = a.y + end;
        } else if constexpr (!P::kStabilised) {
            x = b.x, y = b.y;
        } else {
            const float2 rows = rounded_up_maxima(a.x, a.y, m_in, lane);
            x = m_in + -rows.x, y = m_in + -rows.y;
        }
    }

    // to_boundary: log2 of the decay of the chunks walked before.
    __device__ inline void write(SegmentStage& out, FloatPair to_boundary, float scale) const {
        auto scaled = [&](FloatPair x, float log2_w) {
            const float log2 = rounded_sum(x, to_boundary);
            return kBackward ? scale * exp2f(log2 - log2_w) : exp2f(log2);
        };
        const float scale_x = scaled(x, log2_w.x), scale_y = scaled(y, log2_w.y);
        write_lane_pair(out.key_scale, scale_x, scale_y);
        write_lane_pair(out.norm_key, kBackward ? scale_x * e.x : scale_x,
                        kBackward ? scale_y * e.y : scale_y);
    }
};

}  // namespace tfla_tk::mlstm
