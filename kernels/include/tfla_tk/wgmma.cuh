// Warpgroup MMAs a step of k = 16 at a time, over panel tiles in shared memory.
//
// A panel is 64 columns (128 bytes, 128-byte swizzle) of all rows of a tile; panels follow one another.
#pragma once

#include "kittens.cuh"
#include "tfla_tk/tiles.cuh"

namespace tfla_tk {

// Descriptor of a wgmma operand in 128-byte swizzled panels, made once per tile.
struct Operand128B {
    uint32_t low;

    // The tile's rows are the operand's M or N, its columns are k.
    __device__ static inline Operand128B rows(const void* tile) {
        return {(shared_address(tile) & 0x3FFFF) >> 4 | 1 << 16};
    }
    // The tile's rows are k, its columns the operand's M or N.
    __device__ static inline Operand128B columns(const void* tile, uint32_t panel_bytes) {
        return {(shared_address(tile) & 0x3FFFF) >> 4 | (panel_bytes >> 4) << 16};
    }
    __device__ inline uint64_t at(uint32_t bytes) const {
        constexpr uint64_t kHigh = 1024 >> 4 | 1u << 30;  // eight rows are 1024 bytes apart
        return kHigh << 32 | (low + (bytes >> 4));
    }
    // The step-th 16 of k.
    __device__ inline uint64_t row_step(uint32_t panel_bytes, int step) const {
        return at(step / 4 * panel_bytes + step % 4 * 32);
    }
    __device__ inline uint64_t column_step(int step) const { return at(step * 16 * kPanelColumns * 2); }
};

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// d (+)= A B, A from registers: one step of k = 16. kColumnsOfB: B's columns are N, else its rows.
template <bool kColumnsOfB, class D, class A>
__device__ inline void wgmma_step(D& d, const A& a, int a_step, uint64_t b, bool accumulate = true) {
    kittens::detail::wgmma::base<float, typename A::T, D::cols, 0, kColumnsOfB>::rt_st(d, a.tiles[0][a_step],
                                                                                       b, accumulate);
}

// d (+)= A B^T, both in shared memory: one step of k = 16. kColumnsOfA: A's columns are M, else its rows.
template <class T, bool kColumnsOfA, class D>
__device__ inline void wgmma_step(D& d, uint64_t a, uint64_t b, bool accumulate = true) {
    kittens::detail::wgmma::base<float, T, D::cols, kColumnsOfA, 0>::st_st(d, a, b, accumulate);
}

}  // namespace tfla_tk
