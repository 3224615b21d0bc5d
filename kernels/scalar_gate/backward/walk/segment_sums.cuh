// Segment sums of the backward: what each segment adds to the state at the boundary where the walk leaves it.
// The state is C for dq and its gradient for dk and dv, in the scale in which the walk holds it there.
//
// One CTA = (segment that the walk leaves over a boundary, head, slice of the values, share of the keys). It
// starts at that boundary and walks away from it, against the walk's direction, and stops where the gates
// have forgotten everything further away: a key whose scale is below 2^-150 would be scaled by 0 in fp32.
// Scales are relative to the boundary, so the state itself never decays.
#pragma once

#include "common/kernel.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"
#include "scalar_gate/backward/walk/config.cuh"
#include "scalar_gate/backward/walk/producer.cuh"
#include "scalar_gate/backward/walk/state.cuh"
#include "scalar_gate/gate/suffix.cuh"

namespace tfla_tk::mlstm {

constexpr int kSegmentStages = 4;
// Warpgroup 0 is the producer: warp 0 loads tiles, the other three scan every third chunk's gates each.
// Warpgroup 1 reads all gates once for the bounds. The others hold the state, as in a walk.
constexpr int kSegmentGateWarps = 3;
constexpr PassRegisters kSegmentRegisters{88, 56, 184};

// Fields as in MlstmSegmentsParams of bindings/params_walk.h.
struct SegmentsGlobals : WalkGlobals {
    Gate i, f;
    const float* log2_w;
    const float* chunk_m;
    float scale;
    GateKind gate_kind;
};

// Bounds over the tokens of a segment; one warp's part.
struct SegmentBounds {
    float gates;    // 0, or NaN if one of the gates is NaN
    float largest;  // log2 of the largest scale of a key without the decay to the boundary, at least 0
};

template <class C> struct SegmentsMemory {
    typename C::KeyTile keys[kSegmentStages][C::kParts];
    typename C::ValueTile values[kSegmentStages];
    SegmentStage gates[kSegmentStages];
    SegmentBounds bounds[4];
    PassTask task;
    semaphore gates_ready[kSegmentStages], arrived[kSegmentStages], free[kSegmentStages];
    semaphore bounds_ready, tail_landed;

    __device__ inline void init_barriers() {
        for (int stage = 0; stage < kSegmentStages; stage++) {
            init_warp_barrier(gates_ready[stage], 1);
            init_semaphore(arrived[stage], C::kParts + 1);  // one arrival per tile
            init_warp_barrier(free[stage], C::kStateWarps);
        }
        init_warp_barrier(bounds_ready, 4);
        init_semaphore(tail_landed, 1);
        publish_barriers();
    }
};

// The chunk of a step, against the walk's direction.
template <class C> __device__ inline int chunk_from_boundary(const PassTask& task, int step) {
    return C::kBackward ? step : task.chunks - 1 - step;
}

template <class C> __device__ inline void load_segment(const SegmentsGlobals& g, SegmentsMemory<C>& smem) {
    const PassTask& task = smem.task;
    TileLoader load{task, g.packed(), smem.tail_landed};
    bool last = false;
    for (int step = 0; !last; step++) {
        const int chunk = chunk_from_boundary<C>(task, step);
        const auto [slot, phase] = Use<kSegmentStages>(step);
        wait(smem.gates_ready[slot], phase);  // implies `free`, which the gate warps wait for
        last = smem.gates[slot].last;
        __syncwarp();  // every lane has read `last` before the slot can become free
        for (int part = 0; part < C::kParts; part++)
            load(smem.keys[slot][part], g.keys, smem.arrived[slot], task.keys_column<C>() + part * C::kPart,
                 task.keys_head<C>(), chunk);
        load(smem.values[slot], g.values, smem.arrived[slot], task.column, task.values_head<C>(), chunk);
    }
}

// Computes the bounds of the whole segment, by one warpgroup during the first steps.
template <class C, class P>
__device__ inline void find_bounds(const SegmentsGlobals& g, SegmentsMemory<C>& smem) {
    constexpr int kBatch = 8;  // loads in flight
    const PassTask& task = smem.task;
    const int thread = fresh_thread() % 128;
    SegmentGates gates;
    gates.template add<P>(GateRows(g.i, task.batch, task.head, task.first_row),
                          GateRows(g.f, task.batch, task.head, task.first_row), thread, 128, task.tokens);
    float largest = 0.f;
    if (C::kBackward && g.log2_w)  // the scale s 2^{m_in - M_t} / w_t is at most 1 / w_t
        for (int t = thread; t < task.tokens; t += kBatch * 128) {
            float log2_w[kBatch];
#pragma unroll
            for (int n = 0; n < kBatch; n++)
                log2_w[n] = t + n * 128 < task.tokens ? g.log2_w[task.row + t + n * 128] : 0.f;
#pragma unroll
            for (int n = 0; n < kBatch; n++) largest = fmaxf(largest, -log2_w[n]);
        }
    const SegmentBounds bounds{warp_sum(0.f * static_cast<float>(gates.decay)), warp_max(largest)};
    if (fresh_laneid() == 0) smem.bounds[thread / 32] = bounds;
    arrive_warp(smem.bounds_ready);
}

template <class C, class P>
__device__ inline void scan_segment(const SegmentsGlobals& g, SegmentsMemory<C>& smem, int gate_warp) {
    const PassTask& task = smem.task;
    const GateRows input(g.i, task.batch, task.head, task.first_row);
    const GateRows forget(g.f, task.batch, task.head, task.first_row);
    auto bounds = [&] {
        wait(smem.bounds_ready, 0);
        const SegmentBounds part = smem.bounds[laneid() % 4];
        return SegmentBounds{warp_sum(part.gates), warp_max(part.largest)};
    };
    // for the lane's two tokens of the warp's next chunk
    float2 i{}, f{}, log2_w{}, e{};
    FloatPair m_in{};
    auto load = [&](int step) {
        if (step >= task.chunks) return;
        const int chunk = chunk_from_boundary<C>(task, step);
        i = P::input([&](float none) { return input.pair(chunk, task.tokens, none); });
        f = P::forget([&](float none) { return forget.pair(chunk, task.tokens, none); });
        if constexpr (C::kBackward) log2_w = task.pair(g.log2_w, chunk), e = task.e_pair(g, chunk);
        if constexpr (P::kStabilised)
            m_in = load_chunk_m(g.chunk_m, task.batch_head * g.slots + task.slot + chunk);
    };
    using Chunk = SegmentChunk<P, C::kBackward>;
    FloatPair decay{};  // log2, product over the chunks walked so far
    load(gate_warp);
    scan_in_turns<kSegmentGateWarps>(
        smem.gates, smem.gates_ready, smem.free, gate_warp,
        [&](int step) {
            const Chunk chunk(i, f, log2_w, e, m_in);
            load(step + kSegmentGateWarps);
            return chunk;
        },
        [&](SegmentStage& out, const Chunk& chunk, const SegmentStage* before, int step) {
            if (before) decay = before->decay;
            chunk.write(out, decay, g.scale);
            decay = decay + chunk.decay;
            if (laneid() == 0) out.decay = decay;
            // whether keys further away add nothing, if their scales without decay are at most 2^largest
            auto forgets = [&](float largest) { return rounded_sum(decay, largest) <= kNothing; };
            return step + 1 == task.chunks || (forgets(0.f) && forgets(bounds().largest));
        },
        [&] {
            if (task.share_and_slice<C>(g) != 0) return;
            // the decay of the chunks walked: where others are skipped, it is already 0 in fp32
            const double walked = static_cast<double>(decay) + bounds().gates;
            if (laneid() == 0) g.boundaries.log2_decay[task.left] = walked;
        });
}

// Loads 16 tokens of values^T from 16 k on and adds their contribution to n. `address`: the values' panel
// plus transposed_lane_offset.
template <class C, class A>
__device__ inline void load_values(A& a, float2& norm, uint32_t address, const SegmentStage& gates, int k) {
    load_transposed(a, address + 16 * k * kPanelColumns * sizeof(typename C::T));
    if constexpr (C::kNormalizer) add_row_dots(norm, a, gates.norm_key + 16 * k);
}

template <class C>
__device__ inline void sum_segment(const SegmentsGlobals& g, SegmentsMemory<C>& smem, int warpgroup_id) {
    static_assert(C::kBlocks == 1);
    using T = typename C::T;
    constexpr int kSteps = kChunk / 16;
    const PassTask& task = smem.task;
    const int warp = warpgroup::warpid();
    const uint32_t lane_offset = transposed_lane_offset(warp);

    rt_fl<16, C::kPart> state[C::kParts];
    rt<T, 16, 16> values[kSteps];
    float2 norm{0.f, 0.f};  // n of rows lane / 4 and + 8, this lane's part
#pragma unroll
    for (auto& tile : state) warp::zero(tile);

    bool last = false;
    for (int step = 0; !last; step++) {
        const auto [slot, phase] = Use<kSegmentStages>(step);
        wait(smem.arrived[slot], phase);  // implies gates_ready, which the loads wait for
        const SegmentStage& gates = smem.gates[slot];
        last = gates.last;
        const uint32_t panel = shared_address(smem.values[slot].data[warpgroup_id]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // Halves of the tokens; the second is loaded under the GEMMs of the first. NOTES: the second wait
            // keeps ptxas from moving all loads before the first GEMM.
            if (half > 0) wait(smem.arrived[slot], phase);
            constexpr int kHalf = kSteps / 2;
#pragma unroll
            for (int k = half * kHalf; k < (half + 1) * kHalf; k++) {
                load_values<C>(values[k], norm, panel + lane_offset, gates, k);
                scale_columns(values[k], gates.key_scale + 16 * k);
                pin(values[k]);
            }
            if (half == 0)
#pragma unroll
                for (auto& tile : state) pin(tile);
            wgmma_fence();
#pragma unroll
            for (int k = half * kHalf; k < (half + 1) * kHalf; k++)
                add_keys<C>(state, values[k], smem.keys[slot], k);
            warpgroup::mma_commit_group();
        }
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& a : values) pin(a);
#pragma unroll
        for (auto& tile : state) pin(tile);
        arrive_warp(smem.free[slot]);
    }

    const int row = task.column + warpgroup_id * 64 + warp * 16;
#pragma unroll
    for (int part = 0; part < C::kParts; part++)
        store_state(g.boundaries.c + task.left * g.state_size() + task.keys_column<C>(), state[part], row,
                    part * C::kPart, g.dim_values, g.dim_keys - task.keys_column<C>(), g.state_columns);
    if (!g.boundaries.n || (!C::kBackward && task.share > 0)) return;
    const float2 sums{quad_sum(norm.x), quad_sum(norm.y)};
    float* n = task.boundary_n<C>(g, task.left);
    const int upper = row + laneid() / 4;
    if (laneid() % 4 == 0 && upper < g.dim_values) n[upper] = sums.x;
    if (laneid() % 4 == 0 && upper + 8 < g.dim_values) n[upper + 8] = sums.y;
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void mlstm_pass_segments_kernel(const __grid_constant__ SegmentsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<SegmentsMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

        if (!begin_task<C>(g, smem, blockIdx.x, [&] { g.keys.prefetch(), g.values.prefetch(); }) ||
            smem.task.last)
            return;

        if (warpgroup_id == 0) {
            set_registers<kSegmentRegisters.producer, C::kThreads, 1>();
            const int warp = warpgroup::warpid();
            if (warp == 0)
                load_segment(g, smem);
            else
                with_gate(g.gate_kind, [&]<class P>(P) { scan_segment<C, P>(g, smem, warp - 1); });
        } else if (warpgroup_id == 1) {
            set_registers<kSegmentRegisters.scores, C::kThreads, 1>();
            with_gate(g.gate_kind, [&]<class P>(P) { find_bounds<C, P>(g, smem); });
        } else {
            set_registers<kSegmentRegisters.state, C::kThreads, 1>();
            sum_segment(g, smem, warpgroup_id - 2);
        }
    }
}

}  // namespace tfla_tk::mlstm
