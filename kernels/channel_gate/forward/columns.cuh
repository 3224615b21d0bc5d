// V and O of one walker, from and to global memory. By one warp.
#pragma once

#include "channel_gate/forward/config.cuh"
#include "common/store_rows.cuh"

namespace tfla_tk::channel_gate {

template <class C>
__device__ inline void load_columns(const ForwardGlobals& g, ForwardMemory<C>& smem,
                                    TileLoader<Task>& load_tile, semaphore& arrived, int walker, int step) {
    const Task& task = smem.task;
    load_tile(smem.values[C::values_of(step)][walker], g.v, arrived, task.column + walker * kWalkerColumns,
              task.head, task.template chunk_of<C>(step));
}

template <class C>
__device__ inline void store_columns(const ForwardGlobals& g, ForwardMemory<C>& smem, int walker, int step) {
    const Task& task = smem.task;
    if (g.leaves_part<C>()) return;
    store_chunk(task, g.packed(), g.o, &smem.values[C::out_of(step)][walker], task.template chunk_of<C>(step),
                [&](const TensorMap& map, uint32_t from, int row) {
                    const int column = task.column + walker * kWalkerColumns;
                    map.store_panel(from, column, row, task.head, task.batch);
                });
}

// The loads of V and stores of O of a walker that has columns of its own (WalkConfig), by its first warp. The
// place of V is free when its warps have V in registers, that of O when the store has read it.
template <class C> struct WalkerColumns {
    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    int walker;

    __device__ static inline bool is_first_warp() { return fresh_thread() % 128 < 32; }
    // All warps of the walker.
    __device__ inline void meet() const { named_sync<128>(NamedBarrier::columns, walker); }

    __device__ inline void wait_arrived(int step) const { wait(smem.values_arrived[walker], step & 1); }

    // V of a step, into a place that is free.
    __device__ inline void load(int step) const {
        if (step >= smem.task.chunks || !is_first_warp()) return;
        TileLoader<Task> load_tile(smem.task, g.packed(), smem.tail_of_values[walker]);
        load_columns(g, smem, load_tile, smem.values_arrived[walker], walker, step);
        __syncwarp();
    }
    // After V of a step has been read: starts the load of the next one. The place of O is free afterwards.
    __device__ inline void hand_over_values(int step) const {
        if (is_first_warp()) wait_stores_read();
        meet();
        load(step + 1);
    }
    // After O of a step has been written, and fenced.
    __device__ inline void store(int step) const {
        meet();
        if (is_first_warp()) store_columns(g, smem, walker, step), __syncwarp();
    }
    __device__ inline void finish() const {
        if (is_first_warp()) wait_stores_done();
    }
};

}  // namespace tfla_tk::channel_gate
