// Steps of a warpgroup that makes dq or dk of 64 columns of K, transposed: so the A operand of each GEMM is
// in its own registers and B in shared memory.
#pragma once

#include "common/register_steps.cuh"
#include "delta_rule/backward/sums.cuh"
#include "delta_rule/gates.cuh"

namespace tfla_tk::delta_rule {

// Waits until all walkers have written their part of what they share, for GEMMs to read.
template <class C> __device__ inline void meet_walkers() {
    fence_async_proxy();
    named_sync<128 * C::kWalkers>(NamedBarrier::walkers_meet);
}

// C: the walk, with its type, the columns of V that it has and its tiles.
template <class C> struct KeySteps {
    using T = typename C::T;
    using T2 = typename base_types::packing<T>::packed_type;
    using Fragment = rt<T, 16, 16>;
    using Tokens = rt_fl<16, kChunk>;  // a result, transposed
    using State = rt_fl<16, C::kDimV>;
    static constexpr int kStateSteps = C::kDimV / 16, kTokenSteps = kChunk / 16;
    using Factors = Fragment[kTokenSteps];  // 16 columns of K of a chunk, transposed

    // d = state X^T for a tile X of values
    __device__ static inline void read_state(Tokens& d, Fragment* state, const typename C::Values& tile) {
        const auto rows = Operand128B::rows(&tile);
        forget(d);
        each<0, kStateSteps>([&](int k) {
            multiply_step<false>(d, state[k], rows.row_step(C::Values::panel_bytes, k), k > 0, k == 0);
        });
    }
    __device__ static inline float2 times(float2 x, float constant) {
        return {constant * x.x, constant * x.y};
    }
    __device__ static inline uint32_t address(const typename C::Columns& tile) {
        return shared_address(&tile) + transposed_lane_offset(warpgroup::warpid());
    }
    // Of the j-th 16 tokens.
    __device__ static inline void load(Fragment& factor, const typename C::Columns& tile, int j) {
        load_transposed(factor, address(tile) + 16 * j * kPanelColumns * sizeof(T));
    }
    __device__ static inline void load(Factors& factors, const typename C::Columns& tile) {
        each<0, kTokenSteps>([&](int j) { load(factors[j], tile, j); });
    }
    // In the place of a tile's columns that none but this warp has read.
    __device__ static inline void store(typename C::Columns& tile, const Tokens& result) {
        store_transposed<T>(address(tile), result);
    }
    // Adds the results in a tile.
    __device__ static inline void add(Tokens& result, Fragment (&unpacked)[kTokenSteps],
                                      const typename C::Columns& tile) {
        load(unpacked, tile);
        each<0, 4 * kTokenSteps>([&](int i) {
            const float2 y = to_float2(unpacked[i / 4].tiles[0][0].data[i % 4]);
            float2& x = result.tiles[0][i / 4].data[i % 4];
            x = {x.x + y.x, x.y + y.y};
        });
    }
    // scaled = factors times by and `constant`, rounded
    __device__ static inline void scale(Fragment* scaled, const Factors& factors, const TokenFactors& by,
                                        float constant) {
        const int lane = fresh_laneid();
        each<0, kTokenSteps>([&](int j) {
            const auto of_tokens = by.columns(j, lane);
            each<0, 4>([&](int k) {
                const float2 x = to_float2(factors[j].tiles[0][0].data[k]);
                const float2 e = times(of_tokens.of[k / 2], constant);
                scaled[j].tiles[0][0].data[k] = from_float2<T2>({e.x * x.x, e.y * x.y});
            });
        });
    }
    // result = result times by and `constant`
    __device__ static inline void scale(Tokens& result, const TokenFactors& by, float constant = 1.f) {
        const int lane = fresh_laneid();
        each<0, kTokenSteps>([&](int j) {
            const auto of_tokens = by.columns(j, lane);
            each<0, 4>([&](int k) {
                scale_in_place(result.tiles[0][j].data[k], times(of_tokens.of[k / 2], constant));
            });
        });
    }
    // Adds to `through` the products of a result with `factors` times by and `constant`, rounded as scale()
    // rounds them. Then scales the result by the same. factors(j): of the j-th 16 tokens. kSquares: also the
    // squares, which takes a register more.
    template <bool kSquares = true, class Sums, class OfTokens>
    __device__ static inline void sum_and_scale(Sums& through, Tokens& result, OfTokens factors,
                                                const TokenFactors& by, float constant) {
        const int lane = fresh_laneid();
        each<0, kTokenSteps>([&](int j) {
            const auto of_tokens = by.columns(j, lane);
            const Fragment& factor = factors(j);
            auto& of_pairs = result.tiles[0][j].data;
            each<0, 4>([&](int k) {
                const float2 x = to_float2(factor.tiles[0][0].data[k]);
                const float2 e = times(of_tokens.of[k / 2], constant);
                const float2 scaled{e.x * x.x, e.y * x.y};
                through.add(scaled, to_float2(from_float2<T2>(scaled)), of_pairs[k], kSquares && k == 0);
            });
            // NOTES: before the result is scaled; else ptxas keeps it in other registers, too (C7511)
            through.pin();
            each<0, 4>([&](int k) { scale_in_place(of_pairs[k], times(of_tokens.of[k / 2], constant)); });
        });
    }
    // Of the pair of tokens in data[k] of the j-th 16, whose factors are given.
    __device__ static inline float2 product(const Fragment& factor, const Tokens& result, int j, int k) {
        const float2 x = to_float2(factor.tiles[0][0].data[k]), y = result.tiles[0][j].data[k];
        return {x.x * y.x, x.y * y.y};
    }
};

}  // namespace tfla_tk::delta_rule
