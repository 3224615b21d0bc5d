// What each segment adds to the state at its end, and how much its gates let through: the first of the
// kernels that cut a sequence. Backward in time it is the same of dS at a segment's begin.
//
// A CTA has a (segment, head, 64 columns of K, 64 or 128 columns of V) and goes over it in blocks of 16
// tokens, by the writers of the walks over the states (writers.cuh):
//   loader      a warp: keys, log gates and values of later blocks
//   gate warps  four, which take turns at the blocks: scale the keys in two parts
//   adder       a warpgroup: state <- e^{b_L} state + keys^T values in fp32 registers, and the product of all
//               e^{b_L}
// It makes no scores and no output, so the bytes of its inputs bound its time. Two CTAs share a
// multiprocessor.
#pragma once

#include "channel_gate/segments/params.cuh"
#include "common/kernel.cuh"

namespace tfla_tk::channel_gate {

// By the loader.
template <class C> __device__ inline void load_blocks(const SegmentsGlobals& g, SumsMemory<C>& smem) {
    const SumsTask& task = smem.task;
#pragma unroll 1
    for (int step = 0; step < task.blocks; step++) {
        const int block = task.block_of<C>(step), row = task.first_row + block * kBlock;
        const int tokens = task.tokens - block * kBlock;
        const auto [slot, phase] = Use<C::kStages>(step);
        auto& stage = smem.stages[slot];
        const bool tail = g.packed() && tokens < kBlock;  // of one block of the segment
        semaphore& landed = tail ? smem.tail_landed : smem.arrived[slot];
        wait_free(smem.free[slot], phase);
        if (laneid() == 0) {
            kittens::tma::expect_bytes(
                landed, C::Keys::loaded_bytes + C::Values::loaded_bytes + kBlock * g.gate_row_bytes());
            g.gates.load_panel(stage.gates, landed, task.column, row, task.head, task.batch);
            load_panels(stage.keys, g.keys, landed, task.column, row, task.head, task.batch);
            load_panels(stage.values, g.values, landed, task.value_column, row, task.head, task.batch);
        }
        __syncwarp();
        if (!tail) continue;
        wait(smem.tail_landed, 0);
        zero_bytes(stage.gates, g.gate_row_bytes(), tokens);  // the rows behind belong to the next sequence
        zero_rows(stage.keys, tokens), zero_rows(stage.values, tokens);
        fence_async_proxy();
        __syncwarp();
        if (laneid() == 0) kittens::arrive(smem.arrived[slot]);
    }
}

// gate_warp: the first block that it is at.
template <class C>
__device__ inline void scale_blocks(const SegmentsGlobals& g, SumsMemory<C>& smem, int gate_warp) {
    const SumsTask& task = smem.task;
    WritersOfBlock<typename C::T, !C::kBackward> x;
    x.lane = laneid();
#pragma unroll 1
    for (int step = gate_warp; step < task.blocks; step += C::kGateWarps) {
        const auto [slot, phase] = Use<C::kStages>(step);
        auto& stage = smem.stages[slot];
        x.writers = shared_address(&stage.keys), x.gates = shared_address(stage.gates);
        x.decay = shared_address(smem.decay[slot]);
        // NOTES: a gate warp is not slowed by the adder. Before the place's last block has left, its barrier
        // would take this wait for that of two blocks before.
        wait_free(smem.free[slot], phase);
        wait(smem.arrived[slot], phase);
        x.load_gates(g.g_dtype);
        x.scale_writers(g.scale);
        fence_async_proxy();
        arrive_warp(smem.scaled[slot]);
    }
}

// x times y, at most the largest number: what grows without limit must not make NaN of a state of 0.
__device__ inline float limited_product(float x, float y) {
    constexpr float kLargest = 3.402823466e38f;
    const float product = x * y;
    return product > kLargest ? kLargest : product;  // NaN stays
}

// By the adder.
template <class C> __device__ inline void add_up_blocks(const SegmentsGlobals& g, SumsMemory<C>& smem) {
    using Values = typename C::Values;
    const SumsTask& task = smem.task;
    const int first_column = 16 * warpgroup::warpid(), lane = laneid();
    rt_fl<16, C::kDimV> state;
    float2 through{1.f, 1.f};  // rows lane / 4 and + 8
    warp::zero(state);
    pin(state);
#pragma unroll 1
    for (int step = 0; step < task.blocks; step++) {
        const auto [slot, phase] = Use<C::kStages>(step);
        auto& stage = smem.stages[slot];
        wait(smem.arrived[slot], phase);
        wait(smem.scaled[slot], phase);
        const float* const decay = &smem.decay[slot][first_column + lane / 4];
        const float2 by{decay[0], decay[8]};
        each<0, 4 * C::kDimV / 16>([&](int i) {
            const float of_row = i % 2 ? by.y : by.x;
            scale_in_place(state.tiles[0][i / 4].data[i % 4], {of_row, of_row});
        });
        through = {limited_product(through.x, by.x), limited_product(through.y, by.y)};
        pin(state);
        wgmma_fence();
        const uint64_t values = Operand128B::columns(&stage.values, Values::panel_bytes).at(0);
        auto add = [&](const void* keys) {
            kittens::detail::wgmma::base<float, typename C::T, C::kDimV, 1, 1>::st_st(
                state, Operand128B::columns(keys, 0).at(0), values, 1);
        };
        add(&stage.keys), add(stage.gates);
        warpgroup::mma_commit_group();
        warpgroup::mma_async_wait<0>();
        pin(state);
        arrive_warp(smem.free[slot]);
    }
    const int64_t border = C::kBackward ? task.border - g.heads : task.border;
    const int column = task.column + first_column;
    store_state(g.borders + border * g.dim_k * g.dim_v, state, column, task.value_column, g.dim_k, g.dim_v,
                g.dim_v);
    if (task.value_column != 0 || lane % 4 != 0) return;
    float* const decays = g.decays + border * g.dim_k;
    const int row = column + lane / 4;
    if (row < g.dim_k) decays[row] = through.x;
    if (row + 8 < g.dim_k) decays[row + 8] = through.y;
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 2) void gla_sums_kernel(const __grid_constant__ SegmentsGlobals g) {
    TFLA_DEVICE_CODE {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        auto& smem = *reinterpret_cast<SumsMemory<C>*>(shared_memory);
        const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
        if (!begin_task<C>(g, smem, blockIdx.x,
                           [&] { g.gates.prefetch(), g.keys.prefetch(), g.values.prefetch(); }))
            return;
        if (warp < 4)
            add_up_blocks(g, smem);
        else if (warp < 4 + C::kGateWarps)
            scale_blocks(g, smem, warp - 4);
        else
            load_blocks(g, smem);
    }
}

}  // namespace tfla_tk::channel_gate
