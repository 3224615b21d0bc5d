// Producer warps of the forward's walk: loads and stores.
#pragma once

#include "kda/forward/config.cuh"

namespace tfla_tk::kda {

// Starts a copy from memory to shared memory; its bytes complete `arrived`.
__device__ inline void load_bytes(void* to, const void* from, uint32_t bytes, semaphore& arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&arrived))
        : "memory");
}

// What the matrices kernel has left, by one thread.
template <class C> struct TilesLoader {
    const ForwardGlobals& g;
    ForwardMemory<C>& smem;
    const Task& task;
    const int head;  // of all batch entries

    __device__ inline TilesLoader(const ForwardGlobals& g, ForwardMemory<C>& smem)
        : g(g), smem(smem), task(smem.task), head(smem.task.batch * g.heads + smem.task.head) {}

    // NOTES: with a chunk's stage the matrices' one of an earlier chunk becomes free, if there are fewer.
    __device__ inline void run() {
        constexpr int kLater = C::kStages - C::kMatrixStages;
#pragma unroll 1
        for (int chunk = 0; chunk < task.chunks + kLater; chunk++) {
            wait_until_free(chunk - C::kStages);
            if (chunk >= kLater) load_matrices(chunk - kLater);
            if (chunk < task.chunks) load_tiles(chunk);
        }
    }

  private:
    __device__ inline void wait_until_free(int chunk) {
        if (chunk < 0) return;
        const auto [slot, phase] = Use<C::kStages>(chunk);
        wait(smem.free[slot], phase);
    }
    __device__ inline void load_tiles(int chunk) {
        const int slot = Use<C::kStages>(chunk).slot, place = task.first_slot + chunk;
        semaphore& arrived = smem.arrived[slot];
        tma::expect_bytes(arrived, sizeof(smem.tiles[0]) + sizeof(smem.factors[0]));
        auto load = [&](TileOfChunk tile) {
            load_panels(smem.tiles[slot][tile], g.tiles, arrived, 0, (place * kTiles + tile) * kChunk, head,
                        0);
        };
        const auto* const factors = static_cast<const Factors<C::kDimK>*>(g.factors);
        load(kReads);  // the walkers ask for it first
        load_bytes(&smem.factors[slot], &factors[static_cast<int64_t>(head) * g.slots + place],
                   sizeof(smem.factors[0]), arrived);
        load(kQueries), load(kWriters);
    }
    __device__ inline void load_matrices(int chunk) {
        auto& to = smem.matrices[Use<C::kMatrixStages>(chunk).slot];
        semaphore& arrived = smem.arrived[Use<C::kStages>(chunk).slot];
        const int row = (task.first_slot + chunk) * kChunk;
        tma::expect_bytes(arrived, sizeof(to));
        load_panels(to.a, g.a, arrived, 0, row, head, 0);
        load_panels(to.p, g.p, arrived, 0, row, head, 0);
    }
};

// One warp per walker: V into a stage, and out of it O, which the walker has put in its place.
template <class C>
__device__ inline void load_values_and_store_outputs(const ForwardGlobals& g, ForwardMemory<C>& smem,
                                                     int walker) {
    const Task& task = smem.task;
    const int column = task.column + walker * kWalkerColumns;
    TileLoader<Task> load(task, g.packed(), smem.tail_landed[walker]);
#pragma unroll 1
    for (int chunk = 0; chunk < task.chunks + C::kStages; chunk++) {
        const auto [slot, phase] = Use<C::kStages>(chunk);
        auto& tile = smem.values[slot][walker];
        if (const int stored = chunk - C::kStages; stored >= 0 && stored < task.chunks) {
            wait(smem.out_ready[walker][slot], phase ^ 1);
            store_chunk(task, g.packed(), g.o, &tile, stored,
                        [&](const TensorMap& map, uint32_t from, int row) {
                            map.store_panel(from, column, row, task.head, task.batch);
                        });
            wait_stores_read();
            __syncwarp();
        }
        if (chunk < task.chunks) load(tile, g.v, smem.arrived[slot], column, task.head, chunk);
    }
    wait_stores_done();
}

}  // namespace tfla_tk::kda
