// Scores of a chunk: products of two tiles of tokens.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

// scores = X K^T, issued.
template <class T, int kDimK, class Tile, class Scores>
__device__ inline void issue_scores(Scores& scores, const Tile& rows, const Tile& keys) {
    const auto a = Operand128B::rows(&rows), b = Operand128B::rows(&keys);
    forget(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDimK / 16; k++)
        wgmma_step<T, false>(scores, a.row_step(Tile::panel_bytes, k), b.row_step(Tile::panel_bytes, k),
                             k > 0);
    warpgroup::mma_commit_group();
}

}  // namespace tfla_tk::delta_rule
