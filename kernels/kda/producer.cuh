// Producer warps of a walk: loads and stores.
#pragma once

#include "common/bulk_load.cuh"
#include "kda/walk.cuh"

namespace tfla_tk::kda {

// What the matrices kernel has left, by one thread.
template <class C> struct TilesLoader {
    const WalkGlobals& g;
    WalkMemory<C>& smem;
    const Task& task;
    const int head;  // of all batch entries

    __device__ inline TilesLoader(const WalkGlobals& g, WalkMemory<C>& smem)
        : g(g), smem(smem), task(smem.task), head(smem.task.batch * g.heads + smem.task.head) {}

    // NOTES: with a chunk's stage the matrices' one of an earlier chunk becomes free, if there are fewer.
    __device__ inline void run() {
        constexpr int kLater = C::kStages - C::kMatrixStages;
#pragma unroll 1
        for (int step = 0; step < task.chunks + kLater; step++) {
            wait_until_free(step - C::kStages);
            if (step >= kLater) load_matrices(step - kLater);
            if (step < task.chunks) load_tiles(step);
        }
    }

  private:
    __device__ inline void wait_until_free(int step) {
        if (step < 0) return;
        const auto [slot, phase] = Use<C::kStages>(step);
        wait(smem.free[slot], phase);
    }
    __device__ inline int place_of(int step) const { return task.first_slot + task.chunk_of<C>(step); }
    __device__ inline void load_tiles(int step) {
        const int slot = Use<C::kStages>(step).slot, place = place_of(step);
        semaphore& arrived = smem.arrived[slot];
        tma::expect_bytes(arrived, sizeof(smem.tiles[0]) + sizeof(smem.factors[0]));
        auto load = [&](TileOfChunk tile) {
            load_panels(smem.tiles[slot][tile], g.tiles, arrived, 0, (place * kTiles + tile) * kChunk, head,
                        0);
        };
        // NOTES: first what the walkers read first
        constexpr TileOfChunk kFirst = C::kBackward ? kWriters : kReads;
        const auto* const factors = static_cast<const Factors<C::kDimK>*>(g.factors);
        load(kFirst);
        load_bulk(&smem.factors[slot], &factors[static_cast<int64_t>(head) * g.slots + place],
                  sizeof(smem.factors[0]), arrived);
        load(kQueries), load(C::kBackward ? kReads : kWriters);
    }
    __device__ inline void load_matrices(int step) {
        auto& to = smem.matrices[Use<C::kMatrixStages>(step).slot];
        semaphore& arrived = smem.arrived[Use<C::kStages>(step).slot];
        const int row = place_of(step) * kChunk;
        tma::expect_bytes(arrived, sizeof(to));
        load_panels(to.a, g.a, arrived, 0, row, head, 0);
        load_panels(to.p, g.p, arrived, 0, row, head, 0);
    }
};

// One warp per walker: values into a stage, and out of it results, which the walker has put in their place.
template <class C>
__device__ inline void load_values_and_store_results(const WalkGlobals& g, WalkMemory<C>& smem, int walker) {
    const Task& task = smem.task;
    const int column = task.column + walker * kWalkerColumns;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[walker]);
#pragma unroll 1
    for (int step = 0; step < task.chunks + C::kStages; step++) {
        const auto [slot, phase] = Use<C::kStages>(step);
        auto& tile = smem.values[slot][walker];
        if (const int stored = step - C::kStages; stored >= 0 && stored < task.chunks) {
            wait(smem.out_ready[walker][slot], phase ^ 1);
            store_chunk(task, g.packed(), g.results, &tile, task.chunk_of<C>(stored),
                        [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, column, row, task.head, task.batch);
                        });
            wait_stores_read();
            __syncwarp();
        }
        if (step < task.chunks)
            load(tile, g.values, smem.arrived[slot], column, task.head, task.chunk_of<C>(step));
    }
    wait_stores_done();
}

}  // namespace tfla_tk::kda
