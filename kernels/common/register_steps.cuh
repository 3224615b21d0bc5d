// Pieces of walks whose GEMMs take A from registers, one step of k = 16 at a time.
#pragma once

#include "common/tiles.cuh"
#include "common/wgmma.cuh"

namespace tfla_tk {

// body(i) for i of [begin, end), unrolled.
template <int begin, int end, class Body> __device__ inline void each(Body body) {
#pragma unroll
    for (int i = begin; i < end; i++) body(i);
}

// d (+)= a B, one step of k = 16 in a group of its own. kColumns: B's columns are N, else its rows. `first`
// of the steps that follow one another. NOTES: a group of its own, since with A in registers every HGMMA
// counts by itself: to leave a group of eight in flight would be to wait for seven of them.
template <bool kColumns, class D, class A>
__device__ inline void multiply_step(D& d, A& a, uint64_t b, bool accumulate, bool first) {
    pin(a);
    if (first) pin(d);
    wgmma_fence();
    wgmma_step<kColumns>(d, a, 0, b, accumulate);
    kittens::warpgroup::mma_commit_group();
}

// Waits until no more than the last kSteps of all issued steps run.
template <int kSteps> __device__ inline void wait_but() {
    kittens::warpgroup::mma_async_wait<(kSteps < 7 ? kSteps : 7)>();
}

// Loads 16 tokens each of a panel, transposed. `address`: the panel plus transposed_lane_offset.
template <class A, int kCount> __device__ inline void load_tokens(A (&to)[kCount], uint32_t address) {
    each<0, kCount>([&](int j) { load_transposed(to[j], address + 16 * j * kPanelColumns * 2); });
}

// d += a times a tile whose columns are N, issued.
template <class D, class A, int kCount, class Tile>
__device__ inline void add_columns(D& d, A (&a)[kCount], const Tile& tile, bool first = true) {
    const auto columns = Operand128B::columns(&tile, Tile::panel_bytes);
    each<0, kCount>(
        [&](int j) { multiply_step<true>(d, a[j], columns.column_step(j), true, first && j == 0); });
}
// The same where its rows are N.
template <class D, class A, int kCount, class Tile>
__device__ inline void add_rows(D& d, A (&a)[kCount], const Tile& tile) {
    const auto rows = Operand128B::rows(&tile);
    each<0, kCount>(
        [&](int j) { multiply_step<false>(d, a[j], rows.row_step(Tile::panel_bytes, j), true, j == 0); });
}

template <class A, int kCount> __device__ inline void pin_all(A (&fragments)[kCount]) {
#pragma unroll
    for (auto& a : fragments) pin(a);
}

// Multiplies two numbers in place. NOTES: as asm: else ptxas keeps the products in registers of their own
// (C7512).
__device__ inline void scale_in_place(float2& x, float2 by) {
    asm("mul.ftz.f32 %0, %0, %1;" : "+f"(x.x) : "f"(by.x));
    asm("mul.ftz.f32 %0, %0, %1;" : "+f"(x.y) : "f"(by.y));
}

// x = x * by + plus, in place for the same reason.
__device__ inline void fma_in_place(float2& x, float2 by, float2 plus) {
    asm("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x.x) : "f"(by.x), "f"(plus.x));
    asm("fma.rn.ftz.f32 %0, %0, %1, %2;" : "+f"(x.y) : "f"(by.y), "f"(plus.y));
}

// Transposes a 4 x 4 matrix of words over each four neighbouring lanes: lane i has x[j] = M[j][i] and gets
// M[i][0..3].
template <class Word> __device__ inline uint4 transpose_quad(Word x0, Word x1, Word x2, Word x3) {
    uint32_t x[4] = {*reinterpret_cast<uint32_t*>(&x0), *reinterpret_cast<uint32_t*>(&x1),
                     *reinterpret_cast<uint32_t*>(&x2), *reinterpret_cast<uint32_t*>(&x3)};
    const int lane = fresh_laneid();
    each<0, 2>([&](int bit) {
        const bool upper = lane >> bit & 1;
        each<0, 2>([&](int i) {
            uint32_t &low = bit ? x[i] : x[2 * i], &high = bit ? x[i + 2] : x[2 * i + 1];
            const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? low : high, 1 << bit);
            (upper ? low : high) = other;
        });
    });
    return {x[0], x[1], x[2], x[3]};
}

}  // namespace tfla_tk
