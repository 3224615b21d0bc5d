// GEMMs of whole tiles in shared memory, issued as one group each.
#pragma once

#include "common/register_steps.cuh"
#include "common/tiles.cuh"
#include "common/wgmma.cuh"

namespace tfla_tk {

// d (+)= A B, both in shared memory: one step of k = 16. kTransA, kTransB: columns of the tile are A's rows,
// or B's columns.
template <class T, int kTransA, int kTransB, class D>
__device__ inline void wgmma_shared(D& d, uint64_t a, uint64_t b, bool accumulate) {
    kittens::detail::wgmma::base<float, T, D::cols, kTransA, kTransB>::st_st(d, a, b, accumulate);
}

// scores = X Y^T: all rows of X, and rows of Y from `first` on, as many as `scores` has columns.
template <class T, int kColumns, class Tile, class Scores>
__device__ inline void issue_scores(Scores& scores, const Tile& x, const Tile& y, int first = 0) {
    const auto a = Operand128B::rows(&x), b = Operand128B::rows(&y.data[0][first]);
    forget(scores);
    wgmma_fence();
    each<0, kColumns / 16>([&](int k) {
        wgmma_shared<T, 0, 0>(scores, a.row_step(Tile::panel_bytes, k), b.row_step(Tile::panel_bytes, k),
                              k > 0);
    });
    kittens::warpgroup::mma_commit_group();
}

// d = X S, with S^T as a tile of kRows rows.
template <class T, int kRows, class D, class Tile, class State>
__device__ inline void issue_through(D& d, const Tile& x, const State& transposed) {
    const auto a = Operand128B::rows(&x), b = Operand128B::columns(&transposed, State::panel_bytes);
    forget(d);
    wgmma_fence();
    each<0, kRows / 16>(
        [&](int k) { wgmma_shared<T, 0, 1>(d, a.row_step(Tile::panel_bytes, k), b.column_step(k), k > 0); });
    kittens::warpgroup::mma_commit_group();
}

// d += scores X, or scores^T X, over the tokens of a chunk.
template <class T, int kTransposed, class D, class Square, class Tile>
__device__ inline void issue_add(D& d, const Square& scores, const Tile& x) {
    const auto a =
        kTransposed ? Operand128B::columns(&scores, Square::panel_bytes) : Operand128B::rows(&scores);
    const auto b = Operand128B::columns(&x, Tile::panel_bytes);
    pin(d);
    wgmma_fence();
    each<0, kChunk / 16>([&](int j) {
        wgmma_shared<T, kTransposed, 1>(
            d, kTransposed ? a.column_step(j) : a.row_step(Square::panel_bytes, j), b.column_step(j), true);
    });
    kittens::warpgroup::mma_commit_group();
}

}  // namespace tfla_tk
