// The gate side of the passes of the mLSTM backward: what mlstm_bwd_scan leaves of every chunk, the same for
// all three, and what a warp of a pass makes of it ahead of the GEMMs. And that of the segments kernel, of
// which every warp scans other chunks.
//
// With b, a, M and m_in of gates.cuh, in log2 units, what a token j sends to a token t is weighted by
//     s W_tj / w_t = 2^{sends_j - receives_t}
//         with sends_j = a_j + log2 s and receives_t = M_t + log2 w_t;
// from the state t gets s 2^{m_in - receives_t} of it, and j adds 2^{a_j - M_L} to it, both in the units that
// the state is in (OwedDecay). Each chunk's m_in was saved by the forward, so chunks come in either order.
// The sigmoid gate has m_in = 0 and receives_t = log2 w_t - b_t, and b_L in the place of -M_L.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk {

constexpr int kMostSlices = 4;  // of K in a pass for dq or dk
constexpr int kMostKeys = 256;  // columns of keys of one share

// One chunk, of whatever debt the state in a pass has.
struct alignas(16) ChunkGates {
    float2 sends[kChunk], receives[kChunk];  // as high and low part
    float sent[kChunk], received[kChunk];    // 2^{a_j - M_L} and s 2^{m_in - receives_t}
    float decay;                             // log2, of the state
    int stored[2][kMostSlices];              // shares that have stored dq and dk, by slices
};

}  // namespace tfla_tk

namespace tfla_tk::mlstm {

// Log2. Where a chunk of 64 tokens decays by less, the part of its row sums through the entering state is not
// summed (mlstm_bwd_gates.cuh): 16 tokens, each with an equal share of the decay, tell what the squares of
// all would be.
constexpr float kSlowDecay = -12.f;
__device__ inline float squares_of_all(float decay) {
    const float fading = exp2f(.5f * decay);  // of squares, over 16 tokens
    return (1.f + fading) * (1.f + fading * fading);
}

// What two tokens' values are multiplied with. In bf16 a high and a low part, so that two instructions scale
// and round both; fp16 has too few digits of small scales.
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

// What the GEMM warpgroups read of one chunk.
template <class T2> struct alignas(16) PassStage {
    float2 sends[kChunk], receives[kChunk];  // as high and low part
    float e[kChunk];                         // added to the scores of t
    float query_scale[kChunk];               // of what a query gets from the state
    PairOfScales<T2> key_scale[kChunk / 2];  // of what a key adds to the state
    float decay;                             // of the state and of n, 1 where it is owed
    float slow;                              // squares_of_all of a slow chunk, else 0
};

// s W_tj / w_t of a score.
__device__ inline float pass_gate(float2 sends, float2 receives) {
    return exp2f((sends.x - receives.x) + (sends.y - receives.y));
}

__device__ inline void write_lane_pair(float (&values)[kChunk], float x, float y) {
    *reinterpret_cast<float2*>(&values[2 * fresh_laneid()]) = {x, y};
}

// Of one chunk, by one warp: lane l owns tokens 2 l and 2 l + 1. i, f: their pre-activations. m_in: of the
// chunk.
template <class P> struct ScannedGates {
    TwoPairs b, a;  // of the lane's tokens
    FloatPair end;  // b_L or -M_L

    __device__ inline ScannedGates(float2 i, float2 f, FloatPair m_in, int lane) {
        b = sum_forget(log2_forget<P>(f), lane), a = input_over_forget<P>(i, b);
        end = P::kStabilised ? -larger(m_in, warp_max(a.x, a.y)) : of_last_lane(b.y);
    }
};

// log2_w: of the lane's tokens. The others as in ScannedGates.
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

// A lane's tokens 2 l and 2 l + 1 of a chunk, on their way to a pass.
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

    // owed: of the state, with `settle` nothing after this chunk. whole: of 64 tokens. Returns what the
    // lane's tokens have as keys.
    template <bool kBackward, class T, class T2>
    __device__ inline float2 write(PassStage<T2>& out, OwedDecay<T>& owed, bool settle, bool whole) const {
        const float debt_before = owed.log2, due = owed.add(decay, settle);
        const int lane = fresh_laneid();
        if (lane == 0) {
            out.decay = due;
            out.slow = whole && decay > kSlowDecay ? squares_of_all(decay) : 0.f;
        }
        // what reads the state comes before the decay, what is added to it after
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

// What is read of one chunk when a segment's own state is summed, by the state warpgroups and by the warp
// that scans the next one.
struct alignas(16) SegmentStage {
    float key_scale[kChunk], norm_key[kChunk];  // of a key in the state and in n at the boundary
    bool last;                                  // no chunk further away can add anything
    FloatPair decay;                            // log2, of the chunks walked so far together
};

// One chunk of a segment that is walked from a boundary away, by one warp: lane l owns tokens 2 l and 2 l
// + 1. Scales are those of ChunkGates times the decay from the chunk to the boundary.
template <class P, bool kBackward> struct SegmentChunk {
    FloatPair decay;   // log2, of the chunk
    FloatPair x, y;    // log2 of the scale where the chunk stands, of the lane's tokens
    float2 log2_w, e;  // of the lane's tokens; the scale is over w and n gets e of it, backward in time

    // i, f: of the lane's two tokens. m_in: of the chunk.
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
