// A = -(I + L D)^{-1} L of a strictly lower triangular 64 x 64 matrix L and D = diag(beta), by one warpgroup:
// from -L in shared memory to a tile of A, rounded.
//
// Diagonal blocks of 16 by substitution in fp32. Then blocks are merged, 16 to 32 to 64:
//   [A11  0 ]      T = -L21 - A22 D2 L21
//   [A21 A22]    A21 = T + T D1 A11
// with tensor cores in tf32 and fp32 sums, which begin with -L21 and T. tf32 is as exact as fp16, with the
// range of fp32. Nothing reads a block of 16 right of the diagonal.
#pragma once

#include "common/tiles.cuh"
#include "kittens.cuh"
#include "sequence/cut.h"

namespace tfla_tk::delta_rule {

// Row-major, with columns exchanged so that the eight rows and four columns of a tensor-core fragment, and
// the four rows and eight columns, meet no bank of shared memory twice. NOTES: shared memory bounds the speed
// of makers.
struct TriangularMatrix {
    float data[kChunk][kChunk];

    // Row first_row + row, first_row a multiple of 8 and row below 8. Four columns that begin with a multiple
    // of 4 lie side by side.
    __device__ inline float& at(int first_row, int row, int column) {
        return data[first_row + row][column ^ ((row % 4 ^ row / 4) * 8 + row / 4 * 4)];
    }
    __device__ inline float2& pair_at(int first_row, int row, int column) {
        return reinterpret_cast<float2&>(at(first_row, row, column));
    }
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

// Two 16 x 16 diagonal blocks, from row `first` on, in place, by one warp: a half of it has a block, a lane a
// column. beta: of 64 tokens.
__device__ inline void solve_diagonal_blocks(TriangularMatrix& m, const float* beta, int first, int lane) {
    constexpr int kBlock = 16;
    const int block = first + lane / kBlock * kBlock, column = block + lane % kBlock;
    auto at = [&](int i, int column) -> float& { return m.at(block + i / 8 * 8, i % 8, column); };
    float x[kBlock];  // x[0] is zero
#pragma unroll
    for (int i = 1; i < kBlock; i++) x[i] = at(i, column);
    // what is known is added to all later rows, four columns at a time
#pragma unroll
    for (int k = 0; k < kBlock; k += 4) {
        const float4 factors = *reinterpret_cast<const float4*>(&beta[block + k]);
        const float of[4] = {factors.x, factors.y, factors.z, factors.w};
        float known[4];
        if (k > 0) known[0] = of[0] * x[k];
#pragma unroll
        for (int i = k + 1; i < kBlock; i++) {
            const float4 row = reinterpret_cast<const float4&>(at(i, block + k));
            if (k > 0) x[i] += row.x * known[0];
            if (i > k + 1) x[i] += row.y * known[1];
            if (i > k + 2) x[i] += row.z * known[2];
            if (i > k + 3) x[i] += row.w * known[3];
            if (i < k + 4) known[i - k] = of[i - k] * x[i];
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 1; i < kBlock; i++) at(i, column) = x[i];
}

// 16 rows and kColumns columns of A21 for blocks of kBlock, by one warp. `first`: of A11.
template <int kBlock, int kColumns> struct MergedRows {
    static constexpr int kSteps = kBlock / 8, kTiles = kColumns / 8;
    float result[kTiles][4];

    // row: of the 16 in A21; column: of the kColumns in it, 0 or kColumns.
    __device__ inline MergedRows(TriangularMatrix& m, const float* beta, int first, int row, int column,
                                 int lane) {
        const int r = lane / 4, c = lane % 4, below = first + kBlock;
        float left[kSteps][4];  // 16 rows of T
#pragma unroll
        for (int tile = 0; tile < kSteps; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 pair = m.pair_at(below + row + 8 * half, r, first + 8 * tile + 2 * c);
                left[tile][2 * half] = pair.x, left[tile][2 * half + 1] = pair.y;
            }
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (8 * step >= row + 16) continue;  // right of the diagonal of A22
            uint32_t a[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int k = below + 8 * step + c + n / 2 * 4;
                a[n] = to_tf32(beta[k] * m.at(below + row + n % 2 * 8, r, k));
            }
#pragma unroll
            for (int tile = 0; tile < kSteps; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    b[n] = to_tf32(m.at(below + 8 * step, c + 4 * n, first + 8 * tile + r));
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
            if (8 * step < column) continue;  // right of the diagonal of A11
            const auto& x = left[step];
            const float2 by = *reinterpret_cast<const float2*>(&beta[first + 8 * step + 2 * c]);
            const uint32_t a[4] = {to_tf32(by.x * x[0]), to_tf32(by.x * x[2]), to_tf32(by.y * x[1]),
                                   to_tf32(by.y * x[3])};
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    b[n] = to_tf32(m.at(first + 8 * step, 2 * c + n, first + column + 8 * tile + r));
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
                m.pair_at(first + kBlock + row + 8 * half, r, first + column + 8 * tile + 2 * c) = {
                    result[tile][2 * half], result[tile][2 * half + 1]};
    }
};

// Rounds the diagonal blocks of 32 to a tile, and zeros right of them. A warp has 16 rows.
template <class T, class Square>
__device__ inline void round_diagonal_blocks(Square& tile, TriangularMatrix& m, int warp, int lane) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    const int r = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < kChunk / 16; j++) {
        if (j / 2 < warp / 2) continue;
        T2 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] = from_float2<T2>(
                j <= warp ? m.pair_at(16 * warp + 8 * (k % 2), r, 16 * j + 8 * (k / 2) + 2 * c) : float2{});
        store_fragment<T, kChunk>(shared_address(&tile), 16 * warp, j, x);
    }
}

// Makes A from -L, with the four warps of a warpgroup, which wait for each other in meet(). A is zero on the
// diagonal and right of it, as L is.
template <class T, class Square, class Meet>
__device__ inline void solve_unit_lower(Square& a, TriangularMatrix& m, const float* beta, int warp,
                                        Meet meet) {
    meet();
    // NOTES: the lane's number is read anew for each part, to save registers
    if (warp < 2) solve_diagonal_blocks(m, beta, 32 * warp, fresh_laneid());
    meet();
    {  // 16 to 32: two merges, 8 of 16 columns for each warp
        const int first = warp / 2 * 32, column = warp % 2 * 8;
        const MergedRows<16, 8> merged(m, beta, first, 0, column, fresh_laneid());
        meet();
        merged.store(m, first, 0, column, fresh_laneid());
    }
    meet();
    round_diagonal_blocks<T>(a, m, warp, fresh_laneid());
    // 32 to 64: 16 of 32 rows and 16 of 32 columns for each warp
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    const int row = warp / 2 * 16, column = warp % 2 * 16;
    const MergedRows<32, 16> merged(m, beta, 0, row, column, fresh_laneid());
    T2 x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const auto& of = merged.result[k / 2];
        x[k] = from_float2<T2>({of[k % 2 * 2], of[k % 2 * 2 + 1]});
    }
    store_fragment<T, kChunk>(shared_address(&a), 32 + row, column / 16, x);
}

}  // namespace tfla_tk::delta_rule
