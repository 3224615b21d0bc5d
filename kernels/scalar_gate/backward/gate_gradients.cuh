// After the walks of the backward: di and df from the row sums q_t.dq_t and k_t.dk_t. Equations for mLSTM:
//
//     di_t = k_t.dk_t      dlf_t = sum_{u >= t} (q_u.dq_u - k_u.dk_u) + F_T      df_t = sigmoid(-f_t) dlf_t
//
// dlf_t is the flow of gradient F = <dC, C> + <dn, n> over the boundary before token t. The plain sum would
// collect the rounding noise of all tokens, so F is composed from local sums. For a chunk c let
//
//     before_c      the flow over the boundary before it; before_{c+1} is the flow over the boundary after it
//     received_c    the sum of q.dq through the state that enters it
//     sent_c        the sum of k.dk through the state that leaves it
//     through_c     the flow from the tokens before it to those after it
//
//     before_c     = through_c + received_c
//     before_{c+1} = through_c + sent_c
//     dlf_t        = before_{c+1} + sum_{u >= t, u in c} (q_u.dq_u - k_u.dk_u)
//
// before_c is known at the anchors, from the walks, which may give a value for each side, and at the ends of
// the sequence: before_0 = F_0 and F_T, from the states. From the nearest known ones on both sides the
// equations are followed to the chunk. Where a chunk forgets everything before it, through_c = 0 and both
// start afresh. The two values of through_c are averaged by the inverse of their variances, taken to be
// proportional to the squares of the terms added on the way.
//
// In a chunk that decays slowly (kSlowDecay of walk/gates.cuh) the walks do not compute received_c and
// sent_c; the sums of all its rows replace them. Both then also contain the flow between the chunk's own
// tokens, the same number, so that through_c is smaller by it and the equations still hold. It adds no noise,
// since the walks round it alike. The noise is that of the parts through the states, whose squares the walks
// extrapolate from 16 tokens.
//
//   mlstm_bwd_flows    F_0 and F_T, where there are states
//   mlstm_bwd_gates    one CTA per kAnchorChunks chunks, one warp per chunk
#pragma once

#include "common/kernel.cuh"
#include "kittens.cuh"
#include "scalar_gate/backward/tile.cuh"
#include "scalar_gate/bindings/params_backward.h"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::mlstm {

constexpr int kStateParts = 8;  // CTAs that share the flow through one state
// log2. A chunk whose own tokens outweigh the entering state by so much forgets it. through_c is then below
// the noise of rounded operands (2^-12 in fp16, 2^-9 in bf16), and flows from other chunks would bring noise
// alone. With a stabiliser tokens have exponential weights: a sum over a chunk may be much smaller than its
// largest weight, so there the precision of fp32 decides.
template <class P> constexpr float kForgotten = P::kStabilised ? 24.f : 12.f;

struct ChunkFlow {
    FlowSum received, sent;
    bool forgets;  // the chunk's own tokens outweigh the entering state by 2^kForgotten
};

struct GatesGlobals : TileGlobals {
    RowSums q_dq, k_dk;
    Anchors anchors;
    Gate i, f;
    Gate di, df;
    const float* chunk_m;
    StateGradient initial, last;
    double* state_flows;  // [N, H, 2, kStateParts]: of the initial and of the last state
    int anchor_slots;
    int64_t state_size, norm_size;  // of c and n of one head
};

// The tokens of a lane: l and l + 32 of its warp's chunk.
struct LaneTokens {
    int low, high;  // in the tile
    bool has_low, has_high;

    __device__ inline LaneTokens(int chunk, int tokens)
        : low(chunk * kChunk + fresh_laneid()),
          high(low + 32),
          has_low(low < tokens),
          has_high(high < tokens) {}

    template <class Rows> __device__ inline float2 load(const Rows& rows, float none) const {
        return {has_low ? rows[low] : none, has_high ? rows[high] : none};
    }
};

// The gates of these tokens.
template <class P> struct TokenGates {
    float2 i, f;

    template <class Globals>
    __device__ inline TokenGates(const Globals& g, const Tile& tile, const LaneTokens& lane) {
        auto loader = [&](const Gate& gate) {
            return [&](float none) {
                return lane.load(GateRows(gate, tile.batch, tile.head, tile.first_row), none);
            };
        };
        i = P::input(loader(g.i)), f = P::forget(loader(g.f));
    }
};

// Stores the gradients of these gates. flow + sums: dlf of each token.
template <class P, class Globals, class Flow>
__device__ inline void store_gradients(const Globals& g, const Tile& tile, const LaneTokens& lane,
                                       const TokenGates<P>& gates, float2 k_dk, Flow flow, float2 sums) {
    auto store = [&](const Gate& gate, int t, float x) {
        store_gate(gate, tile.batch, tile.head, tile.first_row + t, x);
    };
    auto finish = [&](int t, float k_dk, float sum, float i, float f) {
        if constexpr (P::kHasInput) store(g.di, t, P::input_gradient(k_dk, i));
        store(g.df, t, P::forget_gradient(static_cast<float>(flow + sum), f));
    };
    if (lane.has_low) finish(lane.low, k_dk.x, sums.x, gates.i.x, gates.f.x);
    if (lane.has_high) finish(lane.high, k_dk.y, sums.y, gates.i.y, gates.f.y);
}

// RowSums of one chunk, by one warp: the sums of the lane's tokens, a few slices at a time, and the chunk's
// sums, one slice per lane. NOTES: the constructor issues the loads of the first slices and the additions
// come later, since waiting for one load after the other would be most of this kernel's time.
struct ChunkSums {
    static constexpr int kAhead = 4;  // slices
    const float* whole;
    const FlowSum* inter;
    int64_t whole_stride, inter_stride;
    int slices;
    LaneTokens lane;
    float2 ahead[kAhead];
    FlowSum lane_inter{0.f, 0.f};

    __device__ inline ChunkSums(const GatesGlobals& g, const Tile& tile, const RowSums& sums, int chunk,
                                const LaneTokens& lane)
        : whole(sums.whole + tile.batch_head * g.seq + tile.first_row),
          inter(sums.inter + tile.batch_head * g.slots + tile.slot + tile.first_chunk + chunk),
          whole_stride(static_cast<int64_t>(g.batch) * g.heads * g.seq),
          inter_stride(static_cast<int64_t>(g.batch) * g.heads * g.slots),
          slices(sums.slices),
          lane(lane) {
        load(0);
        const int own = fresh_laneid();
        if (own < slices && chunk < tile.chunks) lane_inter = inter[own * inter_stride];
    }

    __device__ inline float2 of_tokens(int slice) const {
        return slice < slices ? lane.load(whole + slice * whole_stride, 0.f) : float2{0.f, 0.f};
    }

    // Those of kAhead slices.
    __device__ inline void load(int first) {
#pragma unroll
        for (int n = 0; n < kAhead; n++) ahead[n] = of_tokens(first + n);
    }
    // Sums of the lane's tokens over all slices, in their order.
    __device__ inline float2 rows() {
        float2 sum{0.f, 0.f};
#pragma unroll 1
        for (int first = 0; first < slices; first += kAhead) {
            if (first > 0) load(first);
#pragma unroll
            for (const float2& x : ahead) sum = {sum.x + x.x, sum.y + x.y};
        }
        return sum;
    }
    // The chunk's sum over all slices, by a whole warp.
    __device__ inline FlowSum flow() const {
        FlowSum sum = lane_inter;
#pragma unroll 1
        for (int slice = fresh_laneid() + 32; slice < slices; slice += 32) {
            const FlowSum x = inter[slice * inter_stride];
            sum = {sum.value + x.value, sum.squares + x.squares};
        }
        return {warp_sum(sum.value), warp_sum(sum.squares)};
    }
};

// Whether the chunk's own tokens outweigh all that came before: M_L - m_in in the notation of gate/gates.cuh.
// Without a stabiliser m_in is 0 and weights before the chunk are taken to be at most 1.
template <class P> __device__ inline bool forgets_all_before(float2 i, float2 f, float m_in) {
    const int lane = fresh_laneid();
    const float b_low = warp_inclusive_sum(static_cast<float>(P::log2_forget(f.x)), lane);
    const float b_high = __shfl_sync(0xffffffff, b_low, 31) +
                         warp_inclusive_sum(static_cast<float>(P::log2_forget(f.y)), lane);
    const float a_low = static_cast<float>(P::log2_input(i.x)) - b_low;
    const float a_high = static_cast<float>(P::log2_input(i.y)) - b_high;
    const float a = warp_max(fmaxf(fmaxf(a_low, a_high), -INFINITY));  // of those that are no NaN
    return a - m_in > kForgotten<P>;
}

// <dC, C> + <dn, n> of one part of one state.
__global__ __launch_bounds__(kTileThreads) void mlstm_bwd_flows_kernel(
    const __grid_constant__ GatesGlobals g) {
    TFLA_DEVICE_CODE {
        __shared__ double sums[kTileWarps];
        const int block = blockIdx.x;
        const int part = block % kStateParts, at_end = block / kStateParts % 2;
        const int64_t state = block / (2 * kStateParts);
        const StateGradient& from = at_end ? g.last : g.initial;
        const int first = part * kTileThreads + threadIdx.x;
        double sum = 0.;
        if (from.c) {
            const auto c = reinterpret_cast<const float4*>(from.c + state * g.state_size);
            const auto dc = reinterpret_cast<const float4*>(from.dc + state * g.state_size);
#pragma unroll 4
            for (int64_t n = first; n < g.state_size / 4; n += kStateParts * kTileThreads) {
                const float4 x = c[n], y = dc[n];
                sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
            }
        }
        if (from.n && first < g.norm_size)
            sum += from.n[state * g.norm_size + first] * from.dn[state * g.norm_size + first];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x >= 32) return;
        sum = warp_sum(threadIdx.x < kTileWarps ? sums[threadIdx.x] : 0.);
        if (threadIdx.x == 0) g.state_flows[block] = sum;
    }
}

// This lane's share of the sum of all parts, in fp64.
template <class X> __device__ inline double sum_lane_parts(const X* parts, int count) {
    double sum = 0.;
#pragma unroll 1
    for (int part = fresh_laneid(); part < count; part += 32) sum += parts[part];
    return sum;
}

// before_c of a chunk at an anchor or at an end of the sequence, counted from the sequence's start; this
// lane's part of the sum. flows: after or before the anchors.
__device__ inline double known_flow(const GatesGlobals& g, const Tile& tile, int chunk, const float* flows) {
    const bool at_end = chunk >= tile.all_chunks;
    if (chunk == 0 || at_end) {
        const StateGradient& state = at_end ? g.last : g.initial;
        if (state.c == nullptr && state.n == nullptr) return 0.;
        return sum_lane_parts(g.state_flows + (2 * tile.state + at_end) * kStateParts, kStateParts);
    }
    const int64_t anchor = tile.batch_head * g.anchor_slots + (tile.slot + chunk) / g.anchors.chunks;
    return sum_lane_parts(flows + anchor * g.anchors.parts, g.anchors.parts);
}

// A flow followed from a known one, and the variance of its noise.
struct Flow {
    double value, variance;

    __device__ inline Flow plus(FlowSum x) const { return {value + x.value, variance + x.squares}; }
    // through_c, from the flow on one side of the chunk and the part that the chunk itself receives or sends
    __device__ inline Flow through(FlowSum own, bool forgets) const {
        return forgets ? Flow{0., 0.} : Flow{value - own.value, variance + own.squares};
    }
};

// The weight of the left value in an average by inverse variance. Squares of large gradients may be inf in
// fp32.
__device__ inline double weight_of_left(double left, double right) {
    if (isinf(right)) return isinf(left) ? .5 : 1.;
    return left + right > 0. ? right / (left + right) : 0.;
}

// before_c that are known around and in a tile, every `anchors.chunks` chunks.
struct KnownFlows {
    static constexpr int kMost = kAnchorChunks / 4 + 1;
    double after[kMost], before[kMost];
};

// before_{c+1} of one of the tile's chunks. first, end: the chunks of the tile between the known flows before
// and after it.
__device__ inline double flow_after(const ChunkFlow (&flows)[kAnchorChunks], double before, double after,
                                    int chunk, int first, int end) {
    Flow left{before, 0.}, right{after, 0.};
    for (int c = first; c < chunk; c++)
        left = left.through(flows[c].received, flows[c].forgets).plus(flows[c].sent);
    for (int c = end - 1; c > chunk; c--)
        right = right.through(flows[c].sent, flows[c].forgets).plus(flows[c].received);
    const ChunkFlow& own = flows[chunk];
    left = left.through(own.received, own.forgets), right = right.through(own.sent, own.forgets);
    return right.value + weight_of_left(left.variance, right.variance) * (left.value - right.value) +
           own.sent.value;
}

// sum_{u >= t} of the lane's two tokens.
__device__ inline float2 suffix_sums(float2 x) {
    const int lane = fresh_laneid();
    // lanes in reverse order
    auto reversed = [](float x) { return __shfl_xor_sync(0xffffffff, x, 31); };
    const float high = reversed(warp_inclusive_sum(reversed(x.y), lane));
    const float low = reversed(warp_inclusive_sum(reversed(x.x), lane));
    return {low + __shfl_sync(0xffffffff, high, 0), high};
}

// NOTES: four CTAs per multiprocessor, else ptxas aims at 40 registers and spills.
template <class P>
__global__ __launch_bounds__(kTileThreads,
                             4) void mlstm_bwd_gates_kernel(const __grid_constant__ GatesGlobals g) {
    TFLA_DEVICE_CODE {
        __shared__ ChunkFlow flows[kAnchorChunks];
        __shared__ KnownFlows known;
        const Tile tile = Tile::of_block(g, blockIdx.x);
        if (tile.tokens <= 0) return;
        const int chunk = threadIdx.x / 32;
        const LaneTokens lane(chunk, tile.tokens);
        const TokenGates<P> gates(g, tile, lane);
        ChunkSums q_dq(g, tile, g.q_dq, chunk, lane), k_dk(g, tile, g.k_dk, chunk, lane);
        float m_in = 0.f;
        if (P::kStabilised && chunk < tile.chunks) {
            const int64_t slot = tile.batch_head * g.slots + tile.slot + tile.first_chunk + chunk;
            m_in = load_chunk_m(g.chunk_m, slot).high;
        }
        // two warps have each known flow
        const int every = g.anchors.chunks, place = chunk / 2;
        const bool knows = place <= kAnchorChunks / every, is_before = chunk % 2;
        double known_part = 0.;
        if (knows)
            known_part = known_flow(g, tile, tile.first_chunk + place * every,
                                    is_before ? g.anchors.before : g.anchors.after);
        const float2 q = q_dq.rows(), k = k_dk.rows();
        if (chunk < tile.chunks) {
            ChunkFlow flow{q_dq.flow(), k_dk.flow(), forgets_all_before<P>(gates.i, gates.f, m_in)};
            if (flow.received.value == kNotSummed || flow.sent.value == kNotSummed) {
                flow.received.value = warp_sum(q.x + q.y), flow.sent.value = warp_sum(k.x + k.y);
                flow.forgets = false;
            }
            if (fresh_laneid() == 0) flows[chunk] = flow;
        }
        if (knows) {
            const double flow = warp_sum(known_part);
            if (fresh_laneid() == 0) (is_before ? known.before : known.after)[place] = flow;
        }
        __syncthreads();
        if (chunk >= tile.chunks) return;

        const int stretch = chunk / every, first = stretch * every, end = min(first + every, tile.chunks);
        const double flow =
            flow_after(flows, known.after[stretch], known.before[stretch + 1], chunk, first, end);
        const float2 sums = suffix_sums({q.x - k.x, q.y - k.y});
        store_gradients(g, tile, lane, gates, k, flow, sums);
    }
}

}  // namespace tfla_tk::mlstm
