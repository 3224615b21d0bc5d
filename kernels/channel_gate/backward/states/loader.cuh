// Loads of the walks over the states, by a warp: the tiles of a block of 16 tokens.
#pragma once

#include "channel_gate/backward/states/config.cuh"

namespace tfla_tk::channel_gate {

// Loads columns or values of a step's block, whose place is free: `load(landed, row)` by one thread, of
// `bytes`. Rows that belong to the next packed sequence are zeroed by `zero(first)`; only one block has some.
// All lanes may have used the place before, so in racecheck's build all arrive (common/sync.cuh).
template <class C, class Load, class Zero>
__device__ inline void load_tiles(const StatesGlobals& g, StatesMemory<C>& smem, int step, uint32_t bytes,
                                  semaphore& arrived, semaphore& of_tail, Load load, Zero zero) {
    const StatesTask& task = smem.task;
    const int block = task.template block_of<C>(step), tokens = task.tokens_from(block);
    const bool tail = g.packed() && tokens < kBlock;
    if (fresh_laneid() == 0) {
        semaphore& landed = tail ? of_tail : arrived;
        kittens::tma::expect_bytes(landed, bytes);
        load(landed, task.row_of(block));
    } else if (kArrivalsPerWarp == 32 && !tail) {
        kittens::arrive(arrived);
    }
    __syncwarp();
    if (!tail) return;
    wait(of_tail, 0);
    zero(tokens);
    fence_async_proxy();
    arrive_warp(arrived);
}

// Readers and inflow are for results alone.
template <class C>
__device__ inline void load_columns(const StatesGlobals& g, StatesMemory<C>& smem, int step) {
    const StatesTask& task = smem.task;
    const bool makes_results = g.template makes_results<C>();
    const bool has_inflow = !C::kIsLeft && g.needs_dg && makes_results;
    const uint32_t bytes = (makes_results ? 2 : 1) * C::Columns::loaded_bytes + kBlock * g.gate_row_bytes() +
                           (has_inflow ? kBlock * kFloatRow : 0);
    const int slot = Use<StatesMemory<C>::kStages>(step).slot;
    auto& strips = smem.columns[slot];
    auto load = [&](semaphore& landed, int row) {
#pragma unroll
        for (int i = 0; i < C::kStrips; i++) {
            auto& columns = strips[i];
            const int column = task.column + i * kWalkerColumns;
            g.gates.load_panel(columns.gates, landed, column, row, task.head, task.batch);
            load_panels(columns.writers, g.writers, landed, column, row, task.head, task.batch);
            if (!makes_results) continue;
            load_panels(columns.readers, g.readers, landed, column, row, task.head, task.batch);
            if constexpr (!C::kIsLeft)
                if (has_inflow)
                    g.inflow.box.load_panel(columns.inflow, landed, column, row, task.head, task.batch);
        }
    };
    load_tiles(g, smem, step, C::kStrips * bytes, smem.columns_arrived[slot], smem.columns_tail, load,
               [&](int first) {
                   for (auto& columns : strips) {
                       zero_bytes(columns.gates, g.gate_row_bytes(), first);
                       zero_rows(columns.writers, first), zero_rows(columns.readers, first);
                       if constexpr (!C::kIsLeft) zero_bytes(columns.inflow, kFloatRow, first);
                   }
               });
}

template <class C>
__device__ inline void load_values(const StatesGlobals& g, StatesMemory<C>& smem, int step) {
    const StatesTask& task = smem.task;
    using Memory = StatesMemory<C>;
    semaphore& arrived = smem.values_arrived[Use<Memory::kStages>(step).slot];
    auto& values = smem.values[Use<Memory::kValueStages>(step).slot];
    auto load = [&](semaphore& landed, int row) {
        load_panels(values.of_readers, g.of_readers, landed, 0, row, task.head, task.batch);
        load_panels(values.of_writers, g.of_writers, landed, 0, row, task.head, task.batch);
    };
    load_tiles(g, smem, step, 2 * C::Values::loaded_bytes, arrived, smem.values_tail, load,
               [&](int first) { zero_rows(values.of_readers, first), zero_rows(values.of_writers, first); });
}

// The first blocks.
template <class C> __device__ inline void load_first_steps(const StatesGlobals& g, StatesMemory<C>& smem) {
    const int columns = min(StatesMemory<C>::kStages, smem.task.blocks);
    const int values = min(StatesMemory<C>::kValueStages, smem.task.blocks);
#pragma unroll 1
    for (int step = 0; step < columns; step++) {
        load_columns(g, smem, step);
        if (step < values) load_values(g, smem, step);
    }
}

// By the gate warp of a step, once it has read of the walkers that they are done with the step's values:
// later ones come into their place, if there is a ring of values.
template <class C>
__device__ inline void load_values_behind(const StatesGlobals& g, StatesMemory<C>& smem, int step) {
    const int next = anew(step) + StatesMemory<C>::kValueStages;  // NOTES: places anew, to save registers
    if (C::kSplitsV && next < smem.task.blocks) load_values(g, smem, next);
}

// By the gate warp of a step, after all else that it does there: the block that comes into the step's place.
// With one ring the place is also another strip's and the walkers'.
template <class C>
__device__ inline void load_behind(const StatesGlobals& g, StatesMemory<C>& smem, int strip, int step) {
    const int next = anew(step) + StatesMemory<C>::kStages;  // NOTES: likewise
    if constexpr (C::kSplitsV) {
        __syncwarp();
        if (next < smem.task.blocks) load_columns(g, smem, next);
    } else {
        const auto [slot, phase] = Use<StatesMemory<C>::kStages>(next);
        arrive_warp(smem.free[slot]);
        if (strip != 0 || next >= smem.task.blocks) return;
        wait_free(smem.free[slot], phase);
        load_columns(g, smem, next);
        load_values(g, smem, next);
    }
}

}  // namespace tfla_tk::channel_gate
