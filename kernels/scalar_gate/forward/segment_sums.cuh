// Segment sums of the forward: what each segment adds to the state at its end.
//
// One CTA = (segment that another follows, head, slice of V). It walks the chunks backward in time and stops
// where the gates have forgotten everything earlier: a key whose weight is below 2^-150 of the largest would
// be scaled by 0 in fp32, so skipping it changes no bit of the sum.
#pragma once

#include "common/kernel.cuh"
#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "scalar_gate/forward/globals.cuh"
#include "scalar_gate/gate/suffix.cuh"

namespace tfla_tk::mlstm {

template <class T_, int kDimQK_, int kSliceV_> struct StatesConfig {
    using T = T_;
    static constexpr int kDimQK = kDimQK_, kSliceV = kSliceV_;
    static constexpr int kStages = 4;

    // Warpgroup 0 is the producer: warp 0 loads tiles, the other three scan every third chunk's gates each.
    // Each other warpgroup owns blocks of 64 rows of C.
    static constexpr int kGateWarps = 3;
    static constexpr int kStateWarpgroups = kDimQK == 64 ? 1 : 2;
    static constexpr int kBlocks = kDimQK / 64 / kStateWarpgroups;
    static constexpr int kThreads = 128 * (1 + kStateWarpgroups);
    static constexpr int kStateWarps = 4 * kStateWarpgroups;
    static constexpr int kProducerRegisters = 88,
                         kStateRegisters = 208;  // 88 + 2 * 208 <= 504, of 384 threads

    // C in tiles of at most 128 columns, a wgmma's accumulator
    static constexpr int kTileV = kSliceV == 256 ? 128 : kSliceV;
    static constexpr int kTiles = kSliceV / kTileV;

    using KTile = kittens::st<T, kChunk, kDimQK>;
    using VTile = kittens::st<T, kChunk, kSliceV>;
};

template <class C> struct StatesMemory {
    typename C::KTile k[C::kStages];
    typename C::VTile v[C::kStages];
    SuffixStage gates[C::kStages];
    SegmentGates sums[C::kStateWarps];
    Task task;
    kittens::semaphore gates_ready[C::kStages], arrived[C::kStages], free[C::kStages];
    kittens::semaphore sums_ready;

    __device__ inline void init_barriers() {
        for (int i = 0; i < C::kStages; i++) {
            init_warp_barrier(gates_ready[i], 1);
            kittens::init_semaphore(arrived[i], 1);
            init_warp_barrier(free[i], C::kStateWarps);
        }
        init_warp_barrier(sums_ready, C::kStateWarps);
        publish_barriers();
    }
};

template <class C> __device__ inline void load_backward(const FwdWalkGlobals& g, StatesMemory<C>& smem) {
    const Task& task = smem.task;
    for (int step = 0, chunk = task.chunks - 1; chunk >= 0; step++, chunk--) {
        const auto [slot, phase] = Use<C::kStages>(step);
        const int row = task.first_row + chunk * kChunk;
        wait(smem.gates_ready[slot], phase);  // implies `free`, which the gate warps wait for
        const bool last = smem.gates[slot].last;
        tma::expect_bytes(smem.arrived[slot], sizeof(typename C::KTile) + sizeof(typename C::VTile));
        load_tile(smem.k[slot], g.k, smem.arrived[slot], 0, row, task.key_head, task.batch);
        load_tile(smem.v[slot], g.v, smem.arrived[slot], task.column, row, task.head, task.batch);
        if (last) return;
    }
}

// Sums the gates of the whole segment, by the state warps while the first tiles are loaded.
template <class C, class P> __device__ inline void sum_gates(const FwdWalkGlobals& g, StatesMemory<C>& smem) {
    const Task& task = smem.task;
    const int warp = threadIdx.x / 32 - 4;
    SegmentGates gates;
    gates.template add<P>(GateRows(g.i, task.batch, task.head, task.first_row),
                          GateRows(g.f, task.batch, task.head, task.first_row), warp * 32 + laneid(),
                          C::kStateWarps * 32, task.tokens);
    gates = {warp_sum(gates.decay), warp_max(gates.largest)};
    if (laneid() == 0) smem.sums[warp] = gates;
    arrive_warp(smem.sums_ready);
}

template <class C, class P>
__device__ inline void scan_backward(const FwdWalkGlobals& g, StatesMemory<C>& smem, int gate_warp) {
    const Task& task = smem.task;
    const GateRows input(g.i, task.batch, task.head, task.first_row);
    const GateRows forget(g.f, task.batch, task.head, task.first_row);
    float2 i{}, f{};  // gates of the lane's two tokens of the warp's next chunk
    auto load = [&](int step) {
        const int chunk = task.chunks - 1 - step;
        if (chunk >= 0)
            i = P::input([&](float none) { return input.pair(chunk, task.tokens, none); }),
            f = P::forget([&](float none) { return forget.pair(chunk, task.tokens, none); });
    };
    auto segment_gates = [&] {
        wait(smem.sums_ready, 0);
        const SegmentGates part = laneid() < C::kStateWarps ? smem.sums[laneid()] : SegmentGates{};
        return SegmentGates{warp_sum(part.decay), warp_max(part.largest)};
    };
    using Chunk = SuffixChunk<P>;
    SuffixSum<P> sum;
    load(gate_warp);
    scan_in_turns<C::kGateWarps>(
        smem.gates, smem.gates_ready, smem.free, gate_warp,
        [&](int step) {
            const Chunk chunk(i, f);
            load(step + C::kGateWarps);
            return chunk;
        },
        [&](SuffixStage& out, const Chunk& chunk, const SuffixStage* before, int step) {
            if (before) sum = {before->decay, before->m};
            chunk.write(out, sum);
            if (step + 1 == task.chunks) return true;
            // tested with sum.m first, so that the segment's largest gate is waited for only where that
            // passes
            return sum.forgets(sum.m) && sum.forgets(segment_gates().largest);
        },
        [&] {
            if (task.column != 0) return;
            const auto decay = static_cast<double>(segment_gates().decay);
            if (laneid() == 0) g.workspace.gates[task.slot + g.heads] = {decay, sum.m};
        });
}

template <class C>
__device__ inline void sum_states(const FwdWalkGlobals& g, StatesMemory<C>& smem, int warpgroup_id) {
    using T = typename C::T;
    constexpr int kBlocks = C::kBlocks, kTiles = C::kTiles;
    constexpr uint32_t kPanelBytes = kChunk * kPanelColumns * sizeof(T);
    const Task& task = smem.task;
    const int warp_row = warpgroup_id * kBlocks * 64 + warpgroup::warpid() * 16;
    const uint32_t lane_offset =
        warpgroup_id * kBlocks * kPanelBytes + transposed_lane_offset(warpgroup::warpid());

    rt_fl<16, C::kTileV> state[kBlocks][kTiles];
    rt<T, 16, kChunk> keys[kBlocks];
    float2 norm[kBlocks];  // n of the warp's rows, this lane's part
    auto for_each_tile = [&](auto body) {
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) body(state[block][tile], block, tile);
    };
    for_each_tile([](auto& tile, int, int) { warp::zero(tile); });
#pragma unroll
    for (int block = 0; block < kBlocks; block++) norm[block] = {0.f, 0.f};

    bool last = false;
    for (int step = 0; !last; step++) {
        const auto [slot, phase] = Use<C::kStages>(step);
        wait(smem.arrived[slot], phase);  // implies gates_ready, which the loads wait for
        const SuffixStage& gates = smem.gates[slot];
        last = gates.last;
        const float rescale = gates.rescale;
        if (rescale != 1.f) {
            for_each_tile([&](auto& tile, int, int) { warp::mul(tile, tile, rescale); });
#pragma unroll
            for (int block = 0; block < kBlocks; block++) norm[block].x *= rescale, norm[block].y *= rescale;
        }
#pragma unroll
        for (int block = 0; block < kBlocks; block++) {
            // The second block's keys are loaded under the first block's GEMM. NOTES: the second wait keeps
            // ptxas from moving all loads before the first GEMM.
            if (block > 0) wait(smem.arrived[slot], phase);
            load_scaled_transposed(keys[block], norm[block],
                                   shared_address(&smem.k[slot]) + lane_offset + block * kPanelBytes,
                                   gates.key_scale, 0);
            mma_partial_AB(state[block], keys[block], smem.v[slot], 0);
        }
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (int block = 0; block < kBlocks; block++) pin(keys[block]);
        for_each_tile([](auto& tile, int, int) { pin(tile); });
        arrive_warp(smem.free[slot]);
    }

    const int64_t slot = task.slot + g.heads;  // of the segment that follows
    for_each_tile([&](auto& tile, int block, int index) {
        store_state(g.workspace.arriving.c + slot * g.dim_qk * g.dim_v, tile, warp_row + 64 * block,
                    task.column + index * C::kTileV, g.dim_qk, g.dim_v, g.dim_v);
    });
    if (task.column != 0) return;
    float* n = g.workspace.arriving.n + slot * g.dim_qk;
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
        const float2 sums{quad_sum(norm[block].x), quad_sum(norm[block].y)};
        const int row = warp_row + 64 * block + laneid() / 4;
        if (laneid() % 4 == 0 && row < g.dim_qk) n[row] = sums.x;
        if (laneid() % 4 == 0 && row + 8 < g.dim_qk) n[row + 8] = sums.y;
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void mlstm_states_kernel(const __grid_constant__ FwdWalkGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<StatesMemory<C>*>(shared_memory);
        const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

        if (!begin_task<C>(g, smem, blockIdx.x, [&] { g.k.prefetch(), g.v.prefetch(); }) || smem.task.last)
            return;

        if (warpgroup_id == 0) {
            if constexpr (C::kStateWarpgroups == 2) warpgroup::decrease_registers<C::kProducerRegisters>();
            const int warp = warpgroup::warpid();
            if (warp == 0 && laneid() == 0) load_backward(g, smem);
            if (warp > 0) with_gate(g.gate_kind, [&]<class P>(P) { scan_backward<C, P>(g, smem, warp - 1); });
        } else {
            if constexpr (C::kStateWarpgroups == 2) warpgroup::increase_registers<C::kStateRegisters>();
            with_gate(g.gate_kind, [&]<class P>(P) { sum_gates<C, P>(g, smem); });
            sum_states(g, smem, warpgroup_id - 1);
        }
    }
}

}  // namespace tfla_tk::mlstm
