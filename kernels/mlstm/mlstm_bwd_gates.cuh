// After the passes of the mLSTM backward: di and df from the row sums q_t.dq_t and k_t.dk_t.
//
//     di_t = k_t.dk_t      dlf_t = sum_{u >= t} (q_u.dq_u - k_u.dk_u) + F_T      df_t = sigmoid(-f_t) dlf_t
//
// dlf_t is the flow F = <dC, C> + <dn, n> over the cut before token t. Summed as it stands there it would
// collect the rounding noise of all tokens, so it is put together from what is local. Of a chunk c let
//
//     received_c    the sum of q.dq through the state that enters it
//     sent_c        the sum of k.dk through the state that leaves it
//     through_c     the flow from before it to after it
//
//     dlf_t     = through_c + sent_c + sum_{u >= t, u in c} (q_u.dq_u - k_u.dk_u)
//     through_c = through_{c+1} + received_{c+1} - sent_c      from the right; F_T is received behind the end
//               = through_{c-1} + sent_{c-1} - received_c      from the left; F_0 is sent before the start
//
// and through_c = 0 where the chunk forgets all that came before: both sums start afresh there. What they say
// of a chunk is averaged by the inverse of their noise, whose variance is taken to be proportional to the
// squares of what was summed.
//
//   mlstm_bwd_flows    one warp per chunk: received and sent; other CTAs: F_0 and F_T
//   mlstm_bwd_gates    one CTA per tile of chunks: through, from all chunks of the head; then di and df
#pragma once

#include "kittens.cuh"
#include "tfla_tk/gates.cuh"
#include "tfla_tk/params_bwd.h"
#include "tfla_tk/segments.cuh"

namespace tfla_tk::mlstm {

constexpr int kGatesThreads = 256, kGatesWarps = kGatesThreads / 32;
constexpr int kMostChunks = 64;  // of a tile: what one CTA works on
constexpr int kStateParts = 8;   // CTAs that share the flow through one state
// A state whose weights are this far below those of the chunk's own tokens, in log2, is forgotten: fp32.
constexpr float kForgotten = 24.f;

// Sums over one chunk.
struct alignas(8) ChunkFlow {
    float received, sent;
    float received_squares, sent_squares;
    int forgets;  // all that came before
};

struct GatesGlobals {
    RowSums q_dq, k_dk;
    Gate i, f;
    GateGradient di, df;
    const double* chunk_m;
    StateGradient initial, last;
    ChunkFlow* chunks;    // [B, H, slots]
    double* state_flows;  // [N, H, 2, kStateParts]: of the initial and of the last state
    Cut cut;              // segment: tile
    int batch, heads, seq, slots;
    int64_t state_size, norm_size;  // of c and n of one head

    __device__ inline bool packed() const { return cut.offsets != nullptr; }
};

// Up to kMostChunks chunks of one (sequence, head).
struct Tile {
    int batch, head;
    int first_row, tokens;    // tokens <= 0: nothing to do
    int first_chunk, chunks;  // of its sequence
    int all_chunks;           // of the sequence
    int64_t slot;             // of the sequence's first chunk
    int64_t state;            // sequence * heads + head

    // Called by whole warps.
    __device__ static inline Tile of_block(const GatesGlobals& g, int block) {
        const int head = block % g.heads;
        const Segment s = find_segment(g.cut, g.seq, block / g.heads);
        const int first_chunk = s.number * g.cut.segment_chunks, start = s.first_row - first_chunk * kChunk;
        const int batch = g.packed() ? 0 : s.sequence;
        const int length =
            g.packed() && s.tokens > 0 ? sequence_start(g.cut, g.seq, s.sequence + 1) - start : g.seq;
        const int before = g.packed() ? start / kChunk + s.sequence : 0;  // slots of earlier sequences
        return {batch,
                head,
                s.first_row,
                s.tokens,
                first_chunk,
                (s.tokens + kChunk - 1) / kChunk,
                (length + kChunk - 1) / kChunk,
                (static_cast<int64_t>(batch) * g.heads + head) * g.slots + before,
                static_cast<int64_t>(s.sequence) * g.heads + head};
    }
};

// The entries of a tile's rows in a RowSums tensor, summed over its slices in their order.
struct RowSum {
    const float* rows;
    int64_t slice_stride;
    int slices;

    __device__ inline RowSum(const GatesGlobals& g, const Tile& tile, const float* sums, int slices)
        : rows(sums + (static_cast<int64_t>(tile.batch) * g.heads + tile.head) * g.seq + tile.first_row),
          slice_stride(static_cast<int64_t>(g.batch) * g.heads * g.seq),
          slices(slices) {}

    __device__ inline float operator[](int t) const {
        float sum = rows[t];
        for (int slice = 1; slice < slices; slice++) sum += rows[slice * slice_stride + t];
        return sum;
    }
};

__device__ inline void store_gate(const GateGradient& gate, int64_t offset, float x) {
    switch (gate.dtype) {
        case DType::bfloat16:
            static_cast<__nv_bfloat16*>(gate.data)[offset] = __float2bfloat16(x);
            break;
        case DType::float16:
            static_cast<__half*>(gate.data)[offset] = __float2half(x);
            break;
        default:
            static_cast<float*>(gate.data)[offset] = x;
    }
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// A chunk's tokens in a warp: lane l has l and l + 32.
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

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

// Whether the chunk's own tokens outweigh all that came before: with M of gates.cuh, M_L - m_in.
// Without stabiliser no token has had a weight above 1.
template <bool kSigmoid>
__device__ inline bool forgets_all_before(const GatesGlobals& g, float2 i, float2 f, int64_t slot) {
    const int lane = fresh_laneid();
    const float b_low = warp_inclusive_sum(static_cast<float>(log2_sigmoid(f.x)), lane);
    const float b_high =
        __shfl_sync(0xffffffff, b_low, 31) + warp_inclusive_sum(static_cast<float>(log2_sigmoid(f.y)), lane);
    const float a = fmaxf(static_cast<float>(log2_input<kSigmoid>(i.x)) - b_low,
                          static_cast<float>(log2_input<kSigmoid>(i.y)) - b_high);
    return warp_max(a) - (kSigmoid ? 0.f : static_cast<float>(g.chunk_m[slot])) > kForgotten;
}

template <bool kSigmoid> __device__ inline void sum_chunks(const GatesGlobals& g, const Tile& tile) {
    const RowSum q_dq(g, tile, g.q_dq.inter, g.q_dq.slices), k_dk(g, tile, g.k_dk.inter, g.k_dk.slices);
    const GateRows input(g.i, tile.batch, tile.head, tile.first_row);
    const GateRows forget(g.f, tile.batch, tile.head, tile.first_row);
    for (int chunk = threadIdx.x / 32; chunk < tile.chunks; chunk += kGatesWarps) {
        const LaneTokens lane(chunk, tile.tokens);
        const float2 q = lane.load(q_dq, 0.f), k = lane.load(k_dk, 0.f);
        const float2 i = lane.load(input, kNoInput), f = lane.load(forget, kNoForget);
        const int64_t slot = tile.slot + tile.first_chunk + chunk;
        const ChunkFlow flow{warp_sum(q.x + q.y), warp_sum(k.x + k.y), warp_sum(q.x * q.x + q.y * q.y),
                             warp_sum(k.x * k.x + k.y * k.y), forgets_all_before<kSigmoid>(g, i, f, slot)};
        if (fresh_laneid() == 0) g.chunks[slot] = flow;
    }
}

// <dC, C> + <dn, n> of one part of one state.
__device__ inline void sum_state(const GatesGlobals& g, int block) {
    __shared__ double sums[kGatesWarps];
    const int part = block % kStateParts, at_end = block / kStateParts % 2;
    const int64_t state = block / (2 * kStateParts);
    const StateGradient& from = at_end ? g.last : g.initial;
    const int first = part * kGatesThreads + threadIdx.x;
    double sum = 0.;
    if (from.c) {
        const auto c = reinterpret_cast<const float4*>(from.c + state * g.state_size);
        const auto dc = reinterpret_cast<const float4*>(from.dc + state * g.state_size);
#pragma unroll 4
        for (int64_t n = first; n < g.state_size / 4; n += kStateParts * kGatesThreads) {
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
    sum = warp_sum(threadIdx.x < kGatesWarps ? sums[threadIdx.x] : 0.);
    if (threadIdx.x == 0) g.state_flows[block] = sum;
}

template <bool kSigmoid>
__global__ __launch_bounds__(kGatesThreads) void mlstm_bwd_flows_kernel(
    const __grid_constant__ GatesGlobals g) {
    const int tiles = g.cut.segments * g.heads;
    if (static_cast<int>(blockIdx.x) < tiles)
        sum_chunks<kSigmoid>(g, Tile::of_block(g, blockIdx.x));
    else
        sum_state(g, blockIdx.x - tiles);
}

// What is known of through_c from one side: a sum, and the variance of its noise. `settled`: it starts afresh
// here, so that nothing further away counts.
struct Through {
    double value, variance;
    int settled;

    // `near` continues what `far` has found.
    __device__ static inline Through joined(const Through& far, const Through& near) {
        if (near.settled) return near;
        return {far.value + near.value, far.variance + near.variance, far.settled};
    }
    __device__ static inline Through from_right(const ChunkFlow& own, const ChunkFlow& right) {
        if (own.forgets) return {0., 0., true};
        return {double{right.received} - own.sent, double{right.received_squares} + own.sent_squares, false};
    }
    __device__ static inline Through from_left(const ChunkFlow& own, const ChunkFlow& left) {
        if (own.forgets) return {0., 0., true};
        return {double{left.sent} - own.received, double{left.sent_squares} + own.received_squares, false};
    }
    __device__ inline Through from_later_lane(int step) const {
        return {__shfl_down_sync(0xffffffff, value, step), __shfl_down_sync(0xffffffff, variance, step),
                __shfl_down_sync(0xffffffff, settled, step)};
    }
};

// The chunks of a sequence, with F_0 and F_T in the place of neighbours at its ends.
struct ChunkFlows {
    const GatesGlobals& g;
    const Tile& tile;

    __device__ inline float state_flow(const StateGradient& state, int at_end) const {
        if (state.c == nullptr && state.n == nullptr) return 0.f;
        const double* parts = g.state_flows + (2 * tile.state + at_end) * kStateParts;
        double sum = 0.;
        for (int part = 0; part < kStateParts; part++) sum += parts[part];
        return static_cast<float>(sum);
    }
    __device__ inline ChunkFlow operator[](int chunk) const {
        if (chunk < 0) return {0.f, state_flow(g.initial, 0), 0.f, 0.f, false};
        if (chunk == tile.all_chunks) return {state_flow(g.last, 1), 0.f, 0.f, 0.f, false};
        return g.chunks[tile.slot + chunk];
    }
};

// The steps 0 .. count - 1, far to near, joined by all threads.
template <class Step>
__device__ inline Through join_all(int count, Through (&of_warps)[kGatesWarps], Step step) {
    const int each = (count + kGatesThreads - 1) / kGatesThreads, first = threadIdx.x * each;
    Through sum{0., 0., false};
    for (int n = first; n < min(first + each, count); n++) sum = Through::joined(sum, step(n));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum = Through::joined(sum, sum.from_later_lane(lanes));
    __syncthreads();  // of_warps may still be read
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = of_warps[0];
    for (int warp = 1; warp < kGatesWarps; warp++) sum = Through::joined(sum, of_warps[warp]);
    return sum;
}

// sum_{u >= t} of the lane's two tokens.
__device__ inline float2 suffix_sums(float2 x) {
    const int lane = fresh_laneid();
    // lane l takes the place of lane 31 - l
    auto reversed = [](float x) { return __shfl_xor_sync(0xffffffff, x, 31); };
    const float high = reversed(warp_inclusive_sum(reversed(x.y), lane));
    const float low = reversed(warp_inclusive_sum(reversed(x.x), lane));
    return {low + __shfl_sync(0xffffffff, high, 0), high};
}

template <bool kSigmoid>
__global__ __launch_bounds__(kGatesThreads) void mlstm_bwd_gates_kernel(
    const __grid_constant__ GatesGlobals g) {
    __shared__ Through of_warps[kGatesWarps];
    __shared__ ChunkFlow flows[kMostChunks + 2];  // with both neighbours
    __shared__ Through right[kMostChunks], left[kMostChunks];
    const Tile tile = Tile::of_block(g, blockIdx.x);
    if (tile.tokens <= 0) return;
    const ChunkFlows all{g, tile};
    const int begin = tile.first_chunk, end = begin + tile.chunks;

    // through, of the tile's outermost chunks by all threads, of the others one by one
    if (static_cast<int>(threadIdx.x) < tile.chunks + 2) flows[threadIdx.x] = all[begin + threadIdx.x - 1];
    const int behind = tile.all_chunks - end, before = begin;
    const Through from_right = join_all(behind, of_warps, [&](int n) {
        const int chunk = tile.all_chunks - 1 - n;
        return Through::from_right(all[chunk], all[chunk + 1]);
    });
    const Through from_left =
        join_all(before, of_warps, [&](int n) { return Through::from_left(all[n], all[n - 1]); });
    if (threadIdx.x == 0) {
        Through sum = from_right;
        for (int n = tile.chunks - 1; n >= 0; n--)
            right[n] = sum = Through::joined(sum, Through::from_right(flows[n + 1], flows[n + 2]));
    } else if (threadIdx.x == 32) {
        Through sum = from_left;
        for (int n = 0; n < tile.chunks; n++)
            left[n] = sum = Through::joined(sum, Through::from_left(flows[n + 1], flows[n]));
    }
    __syncthreads();

    const RowSum q_dq(g, tile, g.q_dq.whole, g.q_dq.slices), k_dk(g, tile, g.k_dk.whole, g.k_dk.slices);
    const GateRows input(g.i, tile.batch, tile.head, tile.first_row);
    const GateRows forget(g.f, tile.batch, tile.head, tile.first_row);
    auto store = [&](const GateGradient& gate, int t, float x) {
        store_gate(gate,
                   tile.batch * gate.batch_stride + tile.head * gate.head_stride +
                       (tile.first_row + t) * gate.row_stride,
                   x);
    };
    for (int chunk = threadIdx.x / 32; chunk < tile.chunks; chunk += kGatesWarps) {
        const LaneTokens lane(chunk, tile.tokens);
        const float2 q = lane.load(q_dq, 0.f), k = lane.load(k_dk, 0.f);
        const float2 i = lane.load(input, kNoInput), f = lane.load(forget, kNoForget);
        const Through r = right[chunk], l = left[chunk];
        const double variance = r.variance + l.variance;
        const double of_left = variance > 0. ? r.variance / variance : 0.;
        const double flow = r.value + of_left * (l.value - r.value) + flows[chunk + 1].sent;
        const float2 sums = suffix_sums({q.x - k.x, q.y - k.y});
        auto finish = [&](int t, float k_dk, float dlf, float i, float f) {
            store(g.di, t, kSigmoid ? k_dk * sigmoid(-i) : k_dk);
            store(g.df, t, static_cast<float>(flow + dlf) * sigmoid(-f));
        };
        if (lane.has_low) finish(lane.low, k.x, sums.x, i.x, f.x);
        if (lane.has_high) finish(lane.high, k.y, sums.y, i.y, f.y);
    }
}

}  // namespace tfla_tk::mlstm
