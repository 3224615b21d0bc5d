// TMA stores of the chunks that a CTA walks.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"

namespace tfla_tk {

constexpr int kBoxRows = 16;  // of one store

// Stores the rows of a task's chunk from a panel in shared memory, by one warp: put(map, from, row) one box,
// whose first row is the operand's `row`. `boxes` has kBoxRows rows a box, `single_rows` one. Each lane waits
// for its own stores later.
template <class Task, class Put>
__device__ inline void store_rows(const Task& task, bool packed, const TensorMap& boxes,
                                  const TensorMap& single_rows, const void* panel, int chunk, Put put) {
    const int tokens = min(task.tokens - chunk * kChunk, kChunk), lane = fresh_laneid();
    auto store = [&](const TensorMap& map, int row) {
        put(map, shared_address(panel) + row * kPanelColumns * 2, task.first_row + chunk * kChunk + row);
    };
    // the last box may reach beyond the operand, but not into the next packed sequence
    const int whole = (packed ? tokens : tokens + kBoxRows - 1) / kBoxRows;
    if (lane < whole) store(boxes, lane * kBoxRows);
    if (packed && lane < tokens % kBoxRows) store(single_rows, whole * kBoxRows + lane);
    commit_stores();
}

// The same as one box of `chunks`, by the first lane, where it does not reach into the next packed sequence.
// NOTES: boxes by several lanes are issued one lane after the other, in a loop of eight instructions each.
template <class Task, class Put>
__device__ inline void store_chunk(const Task& task, bool packed, const TensorMap& chunks,
                                   const TensorMap& boxes, const TensorMap& single_rows, const void* panel,
                                   int chunk, Put put) {
    if (packed && task.tokens - chunk * kChunk < kChunk)
        return store_rows(task, packed, boxes, single_rows, panel, chunk, put);
    if (fresh_laneid() == 0) put(chunks, shared_address(panel), task.first_row + chunk * kChunk);
    commit_stores();
}

}  // namespace tfla_tk
