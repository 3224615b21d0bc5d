// What the walks share that make dq, dk and dv at once, from the last chunk to the first
// (delta_rule/backward/gradients/, scalar_gate/backward/gradients/).
#pragma once

#include "common/register_steps.cuh"
#include "common/store_rows.cuh"
#include "common/sync.cuh"
#include "common/tile_products.cuh"

namespace tfla_tk {

// The first of this warp's 16 tokens of a chunk, rows of a tile. NOTES: recomputed, to save registers
__device__ inline int own_token() { return fresh_thread() % 128 / 32 * 16; }

// Where this lane's row of the warp's 16 columns of a panel is, for a transposed ldmatrix or stmatrix.
__device__ inline uint32_t own_columns(const void* panel) {
    const int lane = fresh_laneid(), warp = fresh_thread() / 32 % 4;
    return shared_address(panel) + panel_offset(transposed_row(lane), 2 * warp + lane / 8 % 2);
}
template <class Fragment, int kCount>
__device__ inline void load_columns(Fragment (&to)[kCount], const void* panel) {
    load_tokens(to, own_columns(panel));
}

// visit(j, k, first of the two tokens of data[k] of the j-th 16), where columns are tokens.
template <class Visit> __device__ inline void for_token_pairs(Visit visit) {
    const int lane = 2 * (fresh_laneid() % 4);
    each<0, kChunk / 16>(
        [&](int j) { each<0, 4>([&](int k) { visit(j, k, 16 * j + 8 * (k / 2) + lane); }); });
}
__device__ inline float2 pair_of(const float* factors, int token) {
    return *reinterpret_cast<const float2*>(&factors[token]);
}

// X^T = dS^T K^T. dS^T is rounded to A operands, which go to a tile for the keys' warpgroup, too.
template <class X, class Fragment, int kCount, class Gradient, class Tile, class State>
__device__ inline void read_gradient(X& x, Fragment (&fragments)[kCount], const Gradient& gradient,
                                     const Tile& keys, State& to, int first_row, kittens::semaphore& ready) {
    const auto rows = Operand128B::rows(&keys);
    const uint32_t tile = shared_address(&to);
    multiply_in_turns<Gradient::width>(
        x, fragments,
        [&](Fragment& a, int k) {
            convert_fragment(a, gradient, k);
            store_fragment<typename Fragment::T, State::rows>(tile, first_row, k, a.tiles[0][0].data);
        },
        [&](int k) { return rows.row_step(Tile::panel_bytes, k); },
        [&](const Fragment& a, uint64_t b, int k) { wgmma_step<false>(x, a, 0, b, k > 0); },
        [] { kittens::warpgroup::mma_commit_group(); },
        [&] {
            fence_async_proxy();
            arrive_warp(ready);
        });
}

// Hands a warp's rows of gated scores over in a tile; these have columns from `first` on. Zero right of the
// diagonal, and on it if kStrict.
//   gated(row, column, scores)  of two columns side by side
template <class T, bool kStrict, class Square, class Scores, class Gated>
__device__ inline void store_gated(Square& to, const Scores& scores, int first, Gated gated) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    const int lane = fresh_laneid(), row = own_token() + lane / 4;
    each<0, Scores::width>([&](int j) {
        T2 rounded[4];
        each<0, 4>([&](int k) {
            const int own = row + 8 * (k % 2), column = first + 16 * j + 8 * (k / 2) + 2 * (lane % 4);
            const float2 score = gated(own, column, scores.tiles[0][j].data[k]);
            // NOTES: by selection: gates right of the diagonal may be infinite
            const int last = own - kStrict;
            rounded[k] = from_float2<T2>({column <= last ? score.x : 0.f, column < last ? score.y : 0.f});
        });
        store_fragment<T, kChunk>(shared_address(&to), own_token(), first / 16 + j, rounded);
        asm volatile("" ::: "memory");
    });
    fence_async_proxy();
}

// This lane's part of the sum of the products of two tiles that lie alike, over kRows rows from `row` on.
template <class T, int kRows, class Tile>
__device__ inline float sum_products(const Tile& x, const Tile& y, int row) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    const uint32_t rows = panel_offset(row + fresh_laneid() % 16, fresh_laneid() / 16);
    float2 sum{0.f, 0.f};
    each<0, kRows / 16>([&](int i) {
        each<0, Tile::panels * kPanelColumns / 16>([&](int j) {
            const uint32_t offset =
                (rows ^ (j % 4 * 32)) + j / 4 * Tile::panel_bytes + 16 * i * kPanelColumns * sizeof(T);
            T2 a[4], b[4];
            kittens::move<T2>::ldsm4(a[0], a[1], a[2], a[3], shared_address(&x) + offset);
            kittens::move<T2>::ldsm4(b[0], b[1], b[2], b[3], shared_address(&y) + offset);
            each<0, 4>([&](int k) {
                const float2 u = to_float2(a[k]), w = to_float2(b[k]);
                sum = {fmaf(u.x, w.x, sum.x), fmaf(u.y, w.y, sum.y)};
            });
            asm volatile("" : "+f"(sum.x), "+f"(sum.y)::"memory");
        });
    });
    return sum.x + sum.y;
}

// Stores what has taken the place of tiles, and loads tiles of a later chunk there, by one warp.
//   store(slot, chunk), load(slot, chunk), by all lanes
template <int kStages, class Task, class Store, class Load>
__device__ inline void store_and_load(const Task& task, kittens::semaphore (&ready)[kStages], Store store,
                                      Load load) {
#pragma unroll 1
    for (int step = 0; step < task.chunks + kStages; step++) {
        const int chunk = task.chunks - 1 - step;
        const auto [slot, phase] = Use<kStages>(step);
        if (const int stored = chunk + kStages; step >= kStages) {
            wait(ready[slot], phase ^ 1);
            if (task.owns(stored)) store(slot, stored);
            wait_stores_read();
            __syncwarp();
        }
        if (chunk >= 0) load(slot, chunk);
    }
    wait_stores_done();
}

// Stores the panels of a tile of tokens that begin before `columns`, of columns from `first` on.
template <class Task, class Tile>
__device__ inline void store_panels_of(const Task& task, bool packed, const ResultMaps& to, const Tile& tile,
                                       int chunk, int first, int columns) {
#pragma unroll 1
    for (int panel = 0; panel < Tile::panels; panel++) {
        const int column = first + panel * kPanelColumns;
        if (column >= columns) break;
        store_chunk(task, packed, to, tile.data[panel], chunk,
                    [&](const TensorMap& map, uint32_t from, int row) {
                        map.store_panel(from, column, row, task.head, task.batch);
                    });
    }
}

}  // namespace tfla_tk
