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

// The blocks of 16 x 16 on and below the diagonal, row-major, the rows padded so that the loads of
// tensor-core fragments meet no bank twice.
struct TriangularMatrix {
    static constexpr int kBlock = 16, kBlocks = kChunk / kBlock, kStride = kBlock + 4;
    using Block = float[kBlock][kStride];
    alignas(16) Block blocks[kBlocks * (kBlocks + 1) / 2];

    // The block in a row and a column of blocks, column <= row.
    __device__ inline Block& block(int row, int column) { return blocks[row * (row + 1) / 2 + column]; }
    __device__ inline const Block& block(int row, int column) const {
        return blocks[row * (row + 1) / 2 + column];
    }
};

// An operand in tf32. NOTES: the tensor cores leave out the lower bits, so it is cut off, not rounded; that
// costs less than a tenth of the rounding of A to 16 bits.
__device__ inline uint32_t as_tf32(float x) { return __float_as_uint(x); }

// d += a b for a 16 x 8 and b 8 x 8 fragments.
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A diagonal block, in place, by one warp: a lane has a column.
__device__ inline void invert_diagonal_block(TriangularMatrix::Block& block, int lane) {
    constexpr int kBlock = TriangularMatrix::kBlock;
    const int column = lane % kBlock;
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) x[i] = i == column ? 1.f : 0.f;
    // what is known is taken off all later rows, four columns at a time
#pragma unroll
    for (int k = 0; k < kBlock; k += 4)
#pragma unroll
        for (int i = k + 1; i < kBlock; i++) {
            const float4 row = *reinterpret_cast<const float4*>(&block[i][k]);
            x[i] -= row.x * x[k];
            if (i > k + 1) x[i] -= row.y * x[k + 1];
            if (i > k + 2) x[i] -= row.z * x[k + 2];
            if (i > k + 3) x[i] -= row.w * x[k + 3];
        }
    __syncwarp();
    if (lane < kBlock) {
#pragma unroll
        for (int i = 0; i < kBlock; i++) block[i][column] = x[i];
    }
}

// Fragments of products of blocks, 16 rows and kColumns columns, by one warp. r, c: of a lane.
template <int kColumns> struct RowsOfBlock {
    static constexpr int kTiles = kColumns / 8, kSteps = TriangularMatrix::kBlock / 8;
    float sums[kTiles][4] = {};

    // += X Y for blocks X and Y, whose columns start at `column`.
    __device__ inline void add(const TriangularMatrix::Block& x, const TriangularMatrix::Block& y, int column,
                               int r, int c) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            uint32_t a[4];
#pragma unroll
            for (int n = 0; n < 4; n++) a[n] = as_tf32(x[r + n % 2 * 8][8 * step + c + n / 2 * 4]);
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++) b[n] = as_tf32(y[8 * step + c + 4 * n][column + 8 * tile + r]);
                mma_tf32(sums[tile], a, b);
            }
        }
    }
    // -= X Y for X in fragments, of 16 columns. NOTES: an accumulator has columns 2 c and 2 c + 1 where an
    // operand has c and c + 4. So k is counted in another order, in both operands.
    __device__ inline void subtract(const RowsOfBlock<16>& x, const TriangularMatrix::Block& y, int column,
                                    int r, int c) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const auto& of_x = x.sums[step];
            const uint32_t a[4] = {as_tf32(-of_x[0]), as_tf32(-of_x[2]), as_tf32(-of_x[1]),
                                   as_tf32(-of_x[3])};
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++) b[n] = as_tf32(y[8 * step + 2 * c + n][column + 8 * tile + r]);
                mma_tf32(sums[tile], a, b);
            }
        }
    }
    __device__ inline void store(TriangularMatrix::Block& to, int column, int r, int c) const {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<float2*>(&to[r + 8 * half][column + 8 * tile + 2 * c]) = {
                    sums[tile][2 * half], sums[tile][2 * half + 1]};
    }
};

// In place, by the four warps of a warpgroup, which meet in meet(). The matrix is strictly lower triangular:
// its unit diagonal is implied.
template <class Meet>
__device__ inline void invert_unit_lower(TriangularMatrix& m, int warp, int lane, Meet meet) {
    const int r = lane / 4, c = lane % 4;
    invert_diagonal_block(m.block(warp, warp), lane);
    meet();
    {  // 16 to 32: two merges, 8 of 16 columns for each warp
        const int first = warp / 2 * 2, column = warp % 2 * 8;
        auto& below = m.block(first + 1, first);
        RowsOfBlock<16> left;
        left.add(m.block(first + 1, first + 1), below, 0, r, c);
        RowsOfBlock<8> merged;
        merged.subtract(left, m.block(first, first), column, r, c);
        meet();
        merged.store(below, column, r, c);
    }
    meet();
    {  // 32 to 64: a block for each warp; X22 and X11 have no block above their diagonals
        const int row = 2 + warp / 2, column = warp % 2;
        RowsOfBlock<16> merged;
        // NOTES: not unrolled: the code of makers and walkers has to stay in the instruction cache
#pragma unroll 1
        for (int k = column; k < 2; k++) {
            RowsOfBlock<16> left;
#pragma unroll 1
            for (int n = 2; n <= row; n++) left.add(m.block(row, n), m.block(n, k), 0, r, c);
            merged.subtract(left, m.block(k, column), 0, r, c);
        }
        meet();
        merged.store(m.block(row, column), 0, r, c);
    }
    meet();
}

}  // namespace tfla_tk::delta_rule
