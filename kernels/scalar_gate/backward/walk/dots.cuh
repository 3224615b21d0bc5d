// Row sums of the mLSTM backward's passes: sums of out . factor^T, where out is 64 columns of the gradient,
// transposed, as an accumulator in registers, and the factor is a panel in shared memory.
#pragma once

#include "common/tiles.cuh"
#include "scalar_gate/backward/walk/config.cuh"

namespace tfla_tk::mlstm {

// Of 16 columns of out . factor^T, this lane's products, summed over its two rows: columns 2 (lane % 4) and
// the next one, then those 8 further on.
struct Products {
    float2 x[2];

    template <class T, class Tile>
    __device__ inline Products(const Tile& out, const rt<T, 16, 16>& factor, int j) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 upper = to_float2(factor.tiles[0][0].data[2 * half]);
            const float2 lower = to_float2(factor.tiles[0][0].data[2 * half + 1]);
            const float2 a = out.tiles[0][j].data[2 * half], b = out.tiles[0][j].data[2 * half + 1];
            x[half] = {a.x * upper.x + b.x * lower.x, a.y * upper.y + b.y * lower.y};
        }
    }
};

// 16 columns of the factor, the transpose of a panel. `address`: the panel plus transposed_lane_offset.
template <class T> __device__ inline rt<T, 16, 16> load_factor(uint32_t address, int j) {
    rt<T, 16, 16> factor;
    load_transposed(factor, address + 16 * j * kPanelColumns * sizeof(T));
    return factor;
}

// sums[c] = sum over this warp's 16 rows of out . factor^T, by column. Of the factor's columns `a`, `b` and
// `c` have those from 0, 32 and 16 on; those from 48 on are loaded into a's place.
template <class T, class Tile>
__device__ inline void column_dots(float (&sums)[kChunk], const Tile& out, rt<T, 16, 16>& a,
                                   const rt<T, 16, 16>& b, const rt<T, 16, 16>& c, uint32_t address) {
    static_assert(Tile::width == 4);
    const int lane = fresh_laneid();
    // Over the eight lanes that share columns: each exchange halves the columns that a lane sums.
    auto exchange = [&](float2 first, float2 second, int distance) {
        auto kept = [&](float first, float second) {
            const bool keeps_second = lane & distance;
            const float other = __shfl_xor_sync(0xffffffff, keeps_second ? first : second, distance);
            return (keeps_second ? second : first) + other;
        };
        return float2{kept(first.x, second.x), kept(first.y, second.y)};
    };
    float2 x[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const Products first(out, j == 0 ? a : c, j), second(out, j == 0 ? b : a, j + 2);
        if (j == 0) a = load_factor<T>(address, 3);
#pragma unroll
        for (int half = 0; half < 2; half++) x[j][half] = exchange(first.x[half], second.x[half], 16);
        asm volatile("" ::: "memory");  // NOTES: two fragments at a time: registers
    }
#pragma unroll
    for (int half = 0; half < 2; half++) x[0][half] = exchange(x[0][half], x[1][half], 8);
    const float2 sum = exchange(x[0][0], x[0][1], 4);
    // the bits of lane / 4 have chosen columns 32, 16 and 8
    *reinterpret_cast<float2*>(&sums[2 * fresh_laneid()]) = sum;
}

// This lane's part of the sum of out . factor^T over the j-th 16 columns, which `factor` has.
template <class T, class Tile>
__device__ inline float sum_dots(const Tile& out, const rt<T, 16, 16>& factor, int j) {
    const Products products(out, factor, j);
    return (products.x[0].x + products.x[0].y) + (products.x[1].x + products.x[1].y);
}

}  // namespace tfla_tk::mlstm
