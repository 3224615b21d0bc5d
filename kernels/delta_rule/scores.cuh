// Scores of a chunk: products of two tiles of tokens.
#pragma once

#include "common/sync.cuh"
#include "common/tile_products.cuh"
#include "delta_rule/gates.cuh"

namespace tfla_tk::delta_rule {

using namespace kittens;

// Whether a walk with head dim kDimK of q and k has a warpgroup that makes the scores P of its chunks
// (scorer.cuh), or a maker of A in its place; then walkers make P (chunk_matrices/in_walk.cuh). Else P is
// made with A. A scorer pays where memory bounds the speed: P is not stored and loaded, nor q loaded twice.
// Elsewhere its use of shared memory makes a walk of K = 128 up to 15 % slower. A wide state leaves no
// registers for it. matrices_before in split.py repeats this rule.
template <int kDimK, int kWalkers, int kMakerWarpgroups>
constexpr bool kMakesScores = kDimK <= 64 || (kDimK <= 128 && kWalkers == 2 && kMakerWarpgroups == 0);

// e^{b_i - b_j} of a row i and two columns j side by side, the first one even.
__device__ inline float2 decays_between(const Log2Decay& b, int row, int column) {
    const float2 at = b.of[row];
    const float4 before = *reinterpret_cast<const float4*>(&b.of[column]);
    return {exp2f((at.x - before.x) + (at.y - before.y)), exp2f((at.x - before.z) + (at.y - before.w))};
}

// The factors s e^{b_i - b_j} that turn the products q_i.k_j into P: a warp's 16 rows, kColumns columns.
template <int kColumns> struct ReadGates {
    int first_row, first_column;  // of this lane
    float2 of[kColumns / 16][4];  // as the products lie in a tile

    // By one warp of four.
    __device__ inline ReadGates(const Log2Decay& b, float scale, int first_key, int warp)
        : ReadGates(b, scale, first_key, warp, fresh_laneid()) {}
    __device__ inline ReadGates(const Log2Decay& b, float scale, int first_key, int warp, int lane)
        : first_row(16 * warp + lane / 4), first_column(first_key + 2 * (lane % 4)) {
#pragma unroll
        for (int j = 0; j < kColumns / 16; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 decay = decays_between(b, row(k), column(j, k));
                of[j][k] = {scale * decay.x, scale * decay.y};
            }
    }
    __device__ inline int row(int k) const { return first_row + 8 * (k % 2); }
    __device__ inline int column(int j, int k) const { return first_column + 16 * j + 8 * (k / 2); }

    // Makes P of its products, in place. These begin with the first-th 16 columns of `scores`. P is zero
    // right of the diagonal and past the last token. NOTES: by selection, not by products: what is left out
    // may be NaN or infinite.
    template <class Scores> __device__ inline void apply(Scores& scores, int first, int tokens) const {
#pragma unroll
        for (int j = 0; j < kColumns / 16; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float2& x = scores.tiles[0][first + j].data[k];
                const int last = row(k) < tokens ? row(k) : -1;  // column that the row sees
                x = {column(j, k) <= last ? of[j][k].x * x.x : 0.f,
                     column(j, k) < last ? of[j][k].y * x.y : 0.f};
            }
    }
};

}  // namespace tfla_tk::delta_rule
