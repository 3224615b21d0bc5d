// TMA loads of a task's chunks.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "sequence/cut.h"

namespace tfla_tk {

// Loads tiles of a task's chunks, by one warp. Rows past the last token of a packed sequence belong to the
// next sequence; they are zeroed in shared memory before the tile is handed on.
template <class Task> struct TileLoader {
    const Task& task;
    bool packed;
    kittens::semaphore& tail_landed;
    int tails = 0;  // tiles so far that had rows to zero

    __device__ inline TileLoader(const Task& task, bool packed, kittens::semaphore& tail_landed)
        : task(task), packed(packed), tail_landed(tail_landed) {}

    template <class Tile>
    __device__ inline void operator()(Tile& tile, const TensorMap& map, kittens::semaphore& arrived,
                                      int column, int head, int chunk) {
        const int rows = task.tokens - chunk * kChunk, row = task.first_row + chunk * kChunk;
        const bool tail = packed && rows < kChunk;
        kittens::semaphore& landed = tail ? tail_landed : arrived;
        if (fresh_laneid() == 0) {
            kittens::tma::expect_bytes(landed, Tile::loaded_bytes);
            load_panels(tile, map, landed, column, row, head, task.batch);
        }
        if (!tail) return;
        wait(landed, tails++ & 1);
        zero_rows(tile, rows);
        fence_async_proxy();
        __syncwarp();
        if (fresh_laneid() == 0) kittens::arrive(arrived);
    }
};

}  // namespace tfla_tk
