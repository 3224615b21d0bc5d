// Loads of the walks over the states, by one warp: all tiles of a block of 16 tokens.
#pragma once

#include "channel_gate/backward/states/config.cuh"

namespace tfla_tk::channel_gate {

// Of a block, with needs_dg or not. Readers and inflow are for results alone.
template <class C> __device__ inline uint32_t bytes_of_block(const StatesGlobals& g) {
    const uint32_t gates = kBlock * g.gate_row_bytes();
    const bool makes_results = g.template makes_results<C>();
    const uint32_t inflow = !C::kIsLeft && g.needs_dg && makes_results ? kBlock * kFloatRow : 0;
    const uint32_t columns = (makes_results ? 2 : 1) * C::Columns::loaded_bytes;
    return 2 * C::Values::loaded_bytes + C::kWalkers * (columns + gates + inflow);
}

// By one thread.
template <class C>
__device__ inline void load_block(const StatesGlobals& g, StatesMemory<C>& smem, int slot, int row,
                                  semaphore& landed) {
    const StatesTask& task = smem.task;
    auto& stage = smem.stages[slot];
    kittens::tma::expect_bytes(landed, bytes_of_block<C>(g));
#pragma unroll
    for (int i = 0; i < C::kWalkers; i++) {
        auto& columns = stage.columns[i];
        const int column = task.column + i * kWalkerColumns;
        g.gates.load_panel(columns.gates, landed, column, row, task.head, task.batch);
        load_panels(columns.writers, g.writers, landed, column, row, task.head, task.batch);
        if (!g.template makes_results<C>()) continue;
        load_panels(columns.readers, g.readers, landed, column, row, task.head, task.batch);
        if constexpr (!C::kIsLeft)
            if (g.needs_dg)
                g.inflow.box.load_panel(stage.inflow[i], landed, column, row, task.head, task.batch);
    }
    load_panels(stage.of_readers, g.of_readers, landed, 0, row, task.head, task.batch);
    load_panels(stage.of_writers, g.of_writers, landed, 0, row, task.head, task.batch);
}

// The rows of a block from `first` on, which belong to the next packed sequence.
template <class C>
__device__ inline void zero_rows_of_block(const StatesGlobals& g, StatesMemory<C>& smem, int slot,
                                          int first) {
    auto& stage = smem.stages[slot];
    auto zero = [&](void* rows, uint32_t row_bytes) {
        zero_units(reinterpret_cast<uint4*>(static_cast<char*>(rows) + first * row_bytes),
                   (kBlock - first) * row_bytes / sizeof(uint4));
    };
    for (int i = 0; i < C::kWalkers; i++) {
        auto& columns = stage.columns[i];
        zero(columns.gates, g.gate_row_bytes());
        zero_rows(columns.writers, first), zero_rows(columns.readers, first);
        if constexpr (!C::kIsLeft) zero(stage.inflow[i], kFloatRow);
    }
    zero_rows(stage.of_readers, first), zero_rows(stage.of_writers, first);
}

// The block of a step, if there is one, once its place is free.
template <class C> __device__ inline void load_step(const StatesGlobals& g, StatesMemory<C>& smem, int step) {
    const StatesTask& task = smem.task;
    if (step >= task.blocks) return;
    const int block = task.template block_of<C>(step), tokens = task.tokens_from(block);
    const auto [slot, phase] = Use<StatesMemory<C>::kStages>(step);
    const bool tail = g.packed() && tokens < kBlock;  // of one block of the sequence
    semaphore& arrived = smem.arrived[slot];
    wait_free(smem.free[slot], phase);
    if (fresh_laneid() == 0) load_block(g, smem, slot, task.row_of(block), tail ? smem.tail_landed : arrived);
    __syncwarp();
    if (!tail) return;
    wait(smem.tail_landed, 0);
    zero_rows_of_block(g, smem, slot, tokens);
    fence_async_proxy();
    __syncwarp();
    if (fresh_laneid() == 0) kittens::arrive(arrived);
}

}  // namespace tfla_tk::channel_gate
