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

namespace tfla_tk {

// -L in shared memory, then A before it is rounded. Rows of 64 numbers, with columns exchanged so that the
// eight rows and four columns of a tensor-core fragment, and the four rows and eight columns, meet no bank of
// shared memory twice. NOTES: shared memory bounds the speed of makers, and instructions that of a maker in a
// walk. So a lane's place is computed once for many accesses:
//   place ^ 4 n         n columns further, n below 32 and a multiple of 4, if the column has none of n's bits
//   place + 128         32 columns further
//   place + kEightRows  eight rows further
class TriangularMatrix {
    uint32_t upper, lower;  // shared addresses of rows 0 and 32

  public:
    static constexpr int kRow = 4 * kChunk, kEightRows = 8 * kRow;  // bytes

    // Both addresses are multiples of 256.
    __device__ inline TriangularMatrix(uint32_t upper, uint32_t lower) : upper(upper), lower(lower) {}

    // The address of row `first`, a multiple of 16. The 15 rows below it follow. NOTES: nothing is stored of
    // the upper rows' columns from 32 on, so rows 16 to 31 lie there.
    __device__ inline uint32_t rows(int first) const {
        return first < kChunk / 2 ? upper + first * 8 : lower + (first - kChunk / 2) * kRow;
    }
    // How far row `row`, a multiple of 8 below 32, lies behind row 0.
    static constexpr int from_first_row(int row) { return row / 16 * 128 + row % 16 * kRow; }

    // The address of a column in a row of those that begin at `rows`. row: below 8.
    __device__ static inline uint32_t place(uint32_t rows, int row, int column) {
        return rows + row * kRow + 4 * (column ^ exchange(row));
    }
    // What a column's number is combined with, by exclusive or, in a row.
    static constexpr __host__ __device__ int exchange(int row) {
        return (row % 4 ^ row / 4 % 2) * 8 + row / 4 % 2 * 4;
    }
};

// The memory of the upper and of the lower half of the rows; where it lies is a multiple of 256 bytes.
using UpperRows = float[kChunk / 4][kChunk];
using LowerRows = float[kChunk / 2][kChunk];

__device__ inline float load_number(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ inline float2 load_pair(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}
__device__ inline void store_pair(uint32_t address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}

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

// x of the lane that has the same columns of an accumulator and its row `row`, below 8. NOTES: as asm, in
// which a shuffle may keep any bits of the lane's own number: mask 3 keeps the lowest two, which are the
// columns. The others come from 4 row. So the source needs no register.
__device__ inline float of_row(float x, int row) {
    float found;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31f, 0xffffffff;" : "=f"(found) : "f"(x), "r"(4 * row));
    return found;
}

// The 16 x 16 diagonal block from row `first` on, in place, by one warp. A lane has rows r and r + 8, and of
// each the columns that it has of a tensor-core accumulator. What is known of row k is added to all later
// rows. beta: of 64 tokens.
__device__ inline void solve_diagonal_block(const TriangularMatrix& m, const float* beta, int first,
                                            int lane) {
    using M = TriangularMatrix;
    constexpr uint32_t kAll = 0xffffffff;
    const int r = lane / 4, c = lane % 4;
    const uint32_t place = M::place(m.rows(first), r, first + 2 * c);
    __syncwarp();                // its lanes have written these rows
    float x[2][4], given[2][4];  // of rows r and r + 8; columns 2 c, 2 c + 1 and 8 further
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 pair = load_pair((place ^ 32 * n) + half * M::kEightRows);
            given[half][2 * n] = x[half][2 * n] = pair.x,
                            given[half][2 * n + 1] = x[half][2 * n + 1] = pair.y;
        }
    const float by[2] = {beta[first + r], beta[first + r + 8]};
#pragma unroll
    for (int k = 1; k < 15; k++) {  // row 0 is zero
        const int half_of_k = k / 8;
        if (k % 8 == 0) __syncwarp();  // NOTES: nothing behind it is begun before, to save registers
        float known[4];
#pragma unroll
        for (int n = 0; n < 2 + 2 * half_of_k; n++) known[n] = of_row(by[half_of_k] * x[half_of_k][n], k % 8);
#pragma unroll
        for (int half = half_of_k; half < 2; half++) {
            const float factor = __shfl_sync(kAll, given[half][half_of_k * 2 + k % 2], k % 8 / 2, 4);
            if (r + 8 * half > k)
#pragma unroll
                for (int n = 0; n < 2 + 2 * half_of_k; n++) x[half][n] += factor * known[n];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < 2; n++)
            store_pair((place ^ 32 * n) + half * M::kEightRows, {x[half][2 * n], x[half][2 * n + 1]});
}

// 16 rows and kColumns columns of A21 for blocks of kBlock, by one warp. `first`: of A11; 0 or, of blocks of
// 16, 32.
template <int kBlock, int kColumns> struct MergedRows {
    using M = TriangularMatrix;
    static constexpr int kSteps = kBlock / 8, kTiles = kColumns / 8;
    static constexpr int kTile = 4 * 8;  // bytes of eight columns
    float result[kTiles][4];

    // row: of the 16 in A21; column: of the kColumns in it, 0 or kColumns.
    __device__ inline MergedRows(const M& m, const float* beta, int first, int row, int column, int lane) {
        const int r = lane / 4, c = lane % 4, below = first + kBlock;
        const uint32_t rows = m.rows(below + row), all_rows = m.rows(below);
        float left[kSteps][4];  // 16 rows of T
        const uint32_t of_left = M::place(rows, r, first + 2 * c);
#pragma unroll
        for (int tile = 0; tile < kSteps; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 pair = load_pair((of_left ^ tile * kTile) + half * M::kEightRows);
                left[tile][2 * half] = pair.x, left[tile][2 * half + 1] = pair.y;
            }
        const uint32_t of_a22 = M::place(rows, r, below + c);
        const uint32_t of_l21[2] = {M::place(all_rows, c, first + r), M::place(all_rows, c + 4, first + r)};
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (8 * step >= row + 16) continue;  // right of the diagonal of A22
            uint32_t a[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int k = 8 * step + n / 2 * 4;
                const float x = load_number((of_a22 ^ 4 * k) + n % 2 * M::kEightRows);
                a[n] = to_tf32(beta[below + k + c] * x);
            }
#pragma unroll
            for (int tile = 0; tile < kSteps; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++)
                    b[n] = to_tf32(load_number((of_l21[n] ^ tile * kTile) + step * M::kEightRows));
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
        const uint32_t first_rows = m.rows(first);
        const uint32_t of_a11[2] = {M::place(first_rows, 2 * c, first + column + r),
                                    M::place(first_rows, 2 * c + 1, first + column + r)};
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (8 * step < column) continue;  // right of the diagonal of A11
            const auto& x = left[step];
            const float2 by = *reinterpret_cast<const float2*>(&beta[first + 8 * step + 2 * c]);
            const uint32_t a[4] = {to_tf32(by.x * x[0]), to_tf32(by.x * x[2]), to_tf32(by.y * x[1]),
                                   to_tf32(by.y * x[3])};
            // NOTES: A11 of 32 rows is the upper half, whose two blocks of 16 rows lie side by side (rows())
            const int further = kBlock == 32 ? M::from_first_row(8 * step) : step * M::kEightRows;
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                uint32_t b[2];
#pragma unroll
                for (int n = 0; n < 2; n++) b[n] = to_tf32(load_number((of_a11[n] ^ tile * kTile) + further));
                mma_tf32(result[tile], a, b);
            }
        }
    }

    __device__ inline void store(const M& m, int first, int row, int column, int lane) const {
        const uint32_t place =
            M::place(m.rows(first + kBlock + row), lane / 4, first + column + 2 * (lane % 4));
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_pair((place ^ tile * kTile) + half * M::kEightRows,
                           {result[tile][2 * half], result[tile][2 * half + 1]});
    }
};

// A warp's 16 rows of its diagonal block of 32, rounded.
template <class T> struct RoundedDiagonalRows {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    T2 blocks[2][4];

    __device__ inline RoundedDiagonalRows(const TriangularMatrix& m, int warp, int lane) {
        using M = TriangularMatrix;
        const uint32_t place = M::place(m.rows(16 * warp), lane / 4, warp / 2 * 32 + 2 * (lane % 4));
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int column = 16 * j + 8 * (k / 2);
                blocks[j][k] = from_float2<T2>(
                    j <= warp % 2 ? load_pair((place ^ 4 * column) + k % 2 * M::kEightRows) : float2{});
            }
    }

    // Also zeros right of the block.
    template <class Square> __device__ inline void store(Square& tile, int warp) {
        auto store = [&](int j, T2(&x)[4]) {
            store_fragment<T, kChunk>(shared_address(&tile), 16 * warp, j, x);
        };
#pragma unroll
        for (int j = 0; j < 2; j++) store(warp / 2 * 2 + j, blocks[j]);
        if (warp >= 2) return;
        T2 zeros[4];
#pragma unroll
        for (T2& x : zeros) x = from_float2<T2>(float2{});
#pragma unroll
        for (int j = 2; j < 4; j++) store(j, zeros);
    }
};

// 16 to 32: two merges, 8 of 16 columns for each warp. The warps wait for each other in meet().
template <class Meet>
__device__ inline void merge_to_32(const TriangularMatrix& m, const float* beta, int warp, int lane,
                                   Meet meet) {
    const int first = warp / 2 * 32, column = warp % 2 * 8;
    const MergedRows<16, 8> merged(m, beta, first, 0, column, lane);
    meet();
    merged.store(m, first, 0, column, lane);
}

// 32 to 64: 16 of 32 rows and 16 of 32 columns for each warp. Calls before_store() before it writes to the
// tile.
template <class T, class Square, class BeforeStore>
__device__ inline void merge_to_64(Square& a, const TriangularMatrix& m, const float* beta, int warp,
                                   int lane, BeforeStore before_store) {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    const int row = warp / 2 * 16, column = warp % 2 * 16;
    const MergedRows<32, 16> merged(m, beta, 0, row, column, lane);
    T2 x[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const auto& of = merged.result[k / 2];
        x[k] = from_float2<T2>({of[k % 2 * 2], of[k % 2 * 2 + 1]});
    }
    before_store();
    store_fragment<T, kChunk>(shared_address(&a), 32 + row, column / 16, x);
}

// Where a lane has its first two numbers of its warp's rows of -L, the erasures: what a token erases of what
// earlier ones have written.
__device__ inline uint32_t place_of_erasures(const TriangularMatrix& matrix, int warp, int lane) {
    return TriangularMatrix::place(matrix.rows(16 * warp), lane / 4, 2 * (lane % 4));
}
// Stores a warp's 16 rows and the j-th 16 columns of -L. place: of the lane.
template <class Block> __device__ inline void store_erasures(uint32_t place, const Block& block, int j) {
    using M = TriangularMatrix;
#pragma unroll
    for (int k = 0; k < 4; k++)
        store_pair((place ^ (64 * (j % 2) + 32 * (k / 2))) + j / 2 * 128 + k % 2 * M::kEightRows,
                   block.tiles[0][0].data[k]);
}

// Makes A from -L, of which each of the four warps has written 16 rows. They wait for each other in meet(). A
// is zero on the diagonal and right of it, as L is.
template <class T, class Square, class Meet>
__device__ inline void solve_unit_lower(Square& a, const TriangularMatrix& m, const float* beta, int warp,
                                        Meet meet) {
    // NOTES: the lane's number is read anew for each part, to save registers
    solve_diagonal_block(m, beta, 16 * warp, fresh_laneid());
    meet();
    merge_to_32(m, beta, warp, fresh_laneid(), meet);
    meet();
    RoundedDiagonalRows<T>(m, warp, fresh_laneid()).store(a, warp);
    merge_to_64<T>(a, m, beta, warp, fresh_laneid(), [] {});
}

}  // namespace tfla_tk
