// The inverse of a unit lower triangular 64 x 64 matrix in shared memory, by one warpgroup.
//
// Diagonal blocks of 16 by substitution in fp32. Then blocks are merged, 16 to 32 to 64:
//   [B11  0 ]^{-1}   [      X11         0 ]
//   [B21 B22]      = [-X22 B21 X11    X22 ]
// with tensor cores in tf32 and fp32 sums: as exact as fp16, with the range of fp32.
#pragma once

#include "kittens.cuh"
#include "sequence/cut.h"

namespace tfla_tk::delta_rule {

// Row-major, the rows padded so that the loads of tensor-core fragments meet no bank twice.
struct TriangularMatrix {
    static constexpr int kStride = kChunk + 4;
    float data[kChunk][kStride];
};

__device__ inline uint32_t to_tf32(float x) {
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

// d += a b for a 16 x 8 and b 8 x 8 fragments.
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The 16 x 16 diagonal block that starts at `first`, in place, by one warp: a lane has a column.
__device__ inline void invert_diagonal_block(TriangularMatrix& m, int first, int lane) {
    constexpr int kBlock = 16;
    const int column = lane % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) x[i] = i == column ? 1.f : 0.f;
    // what is known is taken off all later rows, four columns at a time
#pragma unroll
    for (int k = 0; k < kBlock; k += 4)
#pragma unroll
        for (int i = k + 1; i < kBlock; i++) {
            const float4 row = *reinterpret_cast<const float4*>(&m.data[first + i][first + k]);
            x[i] -= row.x * x[k];
            if (i > k + 1) x[i] -= row.y * x[k + 1];
            if (i > k + 2) x[i] -= row.z * x[k + 2];
            if (i > k + 3) x[i] -= row.w * x[k + 3];
        }
    __syncwarp();
    if (lane < kBlock) {
#pragma unroll
        for (int i = 0; i < kBlock; i++) m.data[first + i][first + column] = x[i];
    }
}

// 16 rows and kColumns columns of -X22 B21 X11 for blocks of kBlock, by one warp. `first`: of X11.
template <int kBlock, int kColumns> struct MergedRows {
    static constexpr int kSteps = kBlock / 8, kTiles = kColumns / 8;
    float result[kTiles][4];

    // row: of the 16 in B21, column: of the kColumns in it.
    __device__ inline MergedRows(const TriangularMatrix& m, int first, int row, int column, int lane) {
        const int r = lane / 4, c = lane % 4, below = first + kBlock;
        float left[kSteps][4] = {};  // 16 rows of X22 B21
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            uint32_t a[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                a[n] = to_tf32(m.data[below + row + r + n % 2 * 8][below + 8 * step + c + n / 2 * 4]);
#pragma unroll
            for (int tile = 0; tile < kSteps; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    b[n] = to_tf32(m.data[below + 8 * step + c + 4 * n][first + 8 * tile + r]);
                mma_tf32(left[tile], a, b);
            }
        }
#pragma unroll
        for (auto& tile : result) tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
        // An accumulator has columns 2 c and 2 c + 1 where an operand has c and c + 4. So k is counted in
        // another order, in both operands.
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const auto& x = left[step];
            const uint32_t a[4] = {to_tf32(-x[0]), to_tf32(-x[2]), to_tf32(-x[1]), to_tf32(-x[3])};
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    b[n] = to_tf32(m.data[first + 8 * step + 2 * c + n][first + column + 8 * tile + r]);
                mma_tf32(result[tile], a, b);
            }
        }
    }

    __device__ inline void store(TriangularMatrix& m, int first, int row, int column, int lane) const {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<float2*>(
                    &m.data[first + kBlock + row + r + 8 * half][first + column + 8 * tile + 2 * c]) = {
                    result[tile][2 * half], result[tile][2 * half + 1]};
    }
};

// In place, by the four warps of a warpgroup, which wait for each other in meet(). The matrix is strictly
// lower triangular: its unit diagonal is implied.
template <class Meet>
__device__ inline void invert_unit_lower(TriangularMatrix& m, int warp, int lane, Meet meet) {
    meet();
    invert_diagonal_block(m, 16 * warp, lane);
    meet();
    {  // 16 to 32: two merges, 8 of 16 columns for each warp
        const int first = warp / 2 * 32, column = warp % 2 * 8;
        const MergedRows<16, 8> merged(m, first, 0, column, lane);
        meet();
        merged.store(m, first, 0, column, lane);
    }
    meet();
    {  // 32 to 64: 16 of 32 rows and 16 of 32 columns for each warp
        const int row = warp / 2 * 16, column = warp % 2 * 16;
        const MergedRows<32, 16> merged(m, 0, row, column, lane);
        meet();
        merged.store(m, 0, row, column, lane);
    }
    meet();
}

}  // namespace tfla_tk::delta_rule
