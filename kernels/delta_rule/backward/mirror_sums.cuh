// Sums per token that the mirror leaves: for dbeta over columns of V, for dg over columns of K.
#pragma once

#include "delta_rule/backward/sums.cuh"
#include "delta_rule/gates.cuh"
#include "delta_rule/walk.cuh"

namespace tfla_tk::delta_rule {

// Of a warp, for dbeta: of dY . U'. product(j, k): of dY and the writes, as token_sums has it.
template <class Gates, class Product>
__device__ inline TwoSums strength_sums(const Gates& gates, Product product) {
    const auto [token, of] = token_sums(fresh_laneid(), product);
    auto written = [&](int token) { return written_part(gates.beta.of(token), gates.update.of(token)); };
    return {token, {1.f / written(token) * of.x, 1.f / written(token + 1) * of.y}};
}

// Sums of a walker's warps, which have 16 of its columns each, for a warp of the producer to add up.
struct WalkerSums {
    float of[4][kChunk];

    __device__ inline void write(int warp, const TwoSums& sums) { write_pair(of[warp], sums.token, sums.of); }
    // A lane's sums over the first `warps` warps, in their order.
    __device__ inline TwoSums total(int lane, int warps) const {
        TwoSums sum{2 * lane, {0.f, 0.f}};
#pragma unroll 1
        for (int warp = 0; warp < warps; warp++) {
            const float2 x = *reinterpret_cast<const float2*>(&of[warp][sum.token]);
            sum.of.x += x.x, sum.of.y += x.y;
        }
        return sum;
    }
};

// Of the right part of dk.
struct RightSums {
    WalkerSums whole;
    SumsThroughState through[4];

    // Over the first `warps` warps, in their order.
    __device__ inline SumsThroughState total_through(int warps) const {
        SumsThroughState sum{};
#pragma unroll 1
        for (int warp = 0; warp < warps; warp++) {
            const auto& [x, rounding] = through[warp];
            sum.rounded.value += x.value, sum.rounded.squares += x.squares, sum.rounding += rounding;
        }
        return sum;
    }
};

// How many warps of a walker have columns, of those from `first` up to `columns`; 0 or less: none has.
__device__ inline int warps_with_columns(int first, int columns) {
    return min((columns - first + 15) / 16, 4);
}

}  // namespace tfla_tk::delta_rule
