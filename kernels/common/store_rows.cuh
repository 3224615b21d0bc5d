// TMA stores of the chunks that a CTA walks.
#pragma once

#include "common/sync.cuh"
#include "common/tiles.cuh"
#include "common/tma.cuh"
#include "sequence/cut.h"

namespace tfla_tk {

constexpr int kBoxRows = 16;  // rows of one TMA store

// A result as it is stored: boxes of a chunk, of kBoxRows rows and of one.
struct ResultMaps {
    TensorMap chunk, box, row;

    // map(rows) gives the map of boxes of so many rows.
    template <class Map> static ResultMaps of(Map map) { return {map(kChunk), map(kBoxRows), map(1)}; }
};

// Stores the rows of a task's chunk from a panel in shared memory, by one warp. put(map, from, row) stores
// one box whose first row is row `row` of the operand; boxes of `boxes` have kBoxRows rows, those of
// `single_rows` one. Each lane must later wait for its own stores.
template <class Task, class Put>
__device__ inline void store_rows(const Task& task, bool packed, const TensorMap& boxes,
                                  const TensorMap& single_rows, const void* panel, int chunk, Put put) {
    const int tokens = min(task.tokens - chunk * kChunk, kChunk), lane = fresh_laneid();
    auto store = [&](const TensorMap& map, int row) {
        put(map, shared_address(panel) + row * kPanelColumns * 2, task.first_row + chunk * kChunk + row);
    };
    // the last box may reach past the operand's end, where TMA clips it, but not into the next packed
    // sequence
    const int whole = (packed ? tokens : tokens + kBoxRows - 1) / kBoxRows;
    if (lane < whole) store(boxes, lane * kBoxRows);
    if (packed && lane < tokens % kBoxRows) store(single_rows, whole * kBoxRows + lane);
    commit_stores();
}

// The same as one box of `chunks`, stored by the first lane, where it does not reach into the next packed
// sequence. NOTES: TMA takes its operands from uniform registers, so boxes of several lanes are issued in a
// loop over lanes, eight instructions each.
template <class Task, class Put>
__device__ inline void store_chunk(const Task& task, bool packed, const ResultMaps& to, const void* panel,
                                   int chunk, Put put) {
    if (packed && task.tokens - chunk * kChunk < kChunk)
        return store_rows(task, packed, to.box, to.row, panel, chunk, put);
    if (fresh_laneid() == 0) put(to.chunk, shared_address(panel), task.first_row + chunk * kChunk);
    commit_stores();
}

}  // namespace tfla_tk
