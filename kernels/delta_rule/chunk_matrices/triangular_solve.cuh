// A = -(I + L D)^{-1} L of a strictly lower triangular 64 x 64 matrix L and D = diag(beta), by one warpgroup.
// In shared memory -L is replaced by A.
//
// Diagonal blocks of 16 by substitution in fp32. Then blocks are merged, 16 to 32 to 64:
//   [A11  0 ]      T = -L21 - A22 D2 L21
//   [A21 A22]    A21 = T + T D1 A11
// with tensor cores in tf32 and fp32 sums, which begin with -L21 and T. tf32 is as exact as fp16, with the
// range of fp32.
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

// The 16 x 16 diagonal block that starts at `first`, in place, by one warp: a lane has a column. beta: of 64
// tokens.
__device__ inline void solve_diagonal_block(TriangularMatrix& m, const float* beta, int first, int lane) {
    constexpr int kBlock = 16;
    const int column = first + lane % kBlock;
    float x[kBlock];  // x[0] is zero
#pragma unroll
    for (int i = 1; i < kBlock; i++) x[i] = m.data[first + i][column];
    // what is known is added to all later rows, four columns at a time
#pragma unroll
    for (int k = 0; k < kBlock; k += 4) {
        const float4 factors = *reinterpret_cast<const float4*>(&beta[first + k]);
        const float of[4] = {factors.x, factors.y, factors.z, factors.w};
        float known[4];
        if (k > 0) known[0] = of[0] * x[k];
#pragma unroll
        for (int i = k + 1; i < kBlock; i++) {
            const float4 row = *reinterpret_cast<const float4*>(&m.data[first + i][first + k]);
            if (k > 0) x[i] += row.x * known[0];
            if (i > k + 1) x[i] += row.y * known[1];
            if (i > k + 2) x[i] += row.z * known[2];
            if (i > k + 3) x[i] += row.w * known[3];
            if (i < k + 4) known[i - k] = of[i - k] * x[i];
        }
    }
    __syncwarp();
    if (lane < kBlock) {
#pragma unroll
        for (int i = 1; i < kBlock; i++) m.data[first + i][column] = x[i];
    }
}

// 16 rows and kColumns columns of A21 for blocks of kBlock, by one warp. `first`: of A11.
template <int kBlock, int kColumns> struct MergedRows {
    static constexpr int kSteps = kBlock / 8, kTiles = kColumns / 8;
    float result[kTiles][4];

    // row: of the 16 in A21; column: of the kColumns in it, 0 or kColumns.
    __device__ inline MergedRows(const TriangularMatrix& m, const float* beta, int first, int row, int column,
                                 int lane) {
        const int r = lane / 4, c = lane % 4, below = first + kBlock;
        float left[kSteps][4];  // 16 rows of T
#pragma unroll
        for (int tile = 0; tile < kSteps; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 pair = *reinterpret_cast<const float2*>(
                    &m.data[below + row + r + 8 * half][first + 8 * tile + 2 * c]);
                left[tile][2 * half] = pair.x, left[tile][2 * half + 1] = pair.y;
            }
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            uint32_t a[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int k = below + 8 * step + c + n / 2 * 4;
                a[n] = to_tf32(beta[k] * m.data[below + row + r + n % 2 * 8][k]);
            }
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
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                result[tile][n] = column == 0 ? left[tile][n] : left[kTiles + tile][n];
        // An accumulator has columns 2 c and 2 c + 1 where an operand has c and c + 4. So k is counted in
        // another order, in both operands.
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const auto& x = left[step];
            const float2 by = *reinterpret_cast<const float2*>(&beta[first + 8 * step + 2 * c]);
            const uint32_t a[4] = {to_tf32(by.x * x[0]), to_tf32(by.x * x[2]), to_tf32(by.y * x[1]),
                                   to_tf32(by.y * x[3])};
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

// Replaces -L by A, with the four warps of a warpgroup, which wait for each other in meet(). A is zero on the
// diagonal and right of it, as L is.
template <class Meet>
__device__ inline void solve_unit_lower(TriangularMatrix& m, const float* beta, int warp, int lane,
                                        Meet meet) {
    meet();
    solve_diagonal_block(m, beta, 16 * warp, lane);
    meet();
    {  // 16 to 32: two merges, 8 of 16 columns for each warp
        const int first = warp / 2 * 32, column = warp % 2 * 8;
        const MergedRows<16, 8> merged(m, beta, first, 0, column, lane);
        meet();
        merged.store(m, first, 0, column, lane);
    }
    meet();
    {  // 32 to 64: 16 of 32 rows and 16 of 32 columns for each warp
        const int row = warp / 2 * 16, column = warp % 2 * 16;
        const MergedRows<32, 16> merged(m, beta, 0, row, column, lane);
        meet();
        merged.store(m, 0, row, column, lane);
    }
    meet();
}

}  // namespace tfla_tk::delta_rule
