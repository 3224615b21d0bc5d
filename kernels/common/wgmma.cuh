// Warpgroup MMAs in steps of k = 16 over panel tiles in shared memory.
//
// A panel is 64 columns (128 bytes, 128-byte swizzle) of all rows of a tile; panels follow one another.
#pragma once

#include "common/tiles.cuh"
#include "kittens.cuh"

namespace tfla_tk {

// Descriptor of a wgmma operand in 128-byte swizzled panels, computed once per tile.
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
    // Columns [16 step, 16 step + 16) as k.
    __device__ inline uint64_t row_step(uint32_t panel_bytes, int step) const {
        return at(step / 4 * panel_bytes + step % 4 * 32);
    }
    // Rows [16 step, 16 step + 16) as k. first: byte offset of the operand's first panel.
    __device__ inline uint64_t column_step(int step, uint32_t first = 0) const {
        return at(first + step * 16 * kPanelColumns * 2);
    }
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

// out = sum of kSteps GEMMs of k = 16 with A from registers. `fragments` are a ring: one is being filled
// while the others are read by GEMMs in flight.
//   fill(a, k)         writes columns [16 k, 16 k + 16) of A to a fragment
//   operand(k)         descriptor of B's k-th step, called just before it is used
//   multiply(a, b, k)  issues the k-th GEMM
//   commit()           commits it
//   meanwhile()        runs under the last GEMMs, none of which reads fragments[kSteps % kFragments]
template <int kSteps, class Out, class A, int kFragments, class Fill, class Operand, class Multiply,
          class Commit, class Meanwhile>
__device__ inline void multiply_in_turns(Out& out, A (&fragments)[kFragments], Fill fill, Operand operand,
                                         Multiply multiply, Commit commit, Meanwhile meanwhile) {
    forget(out);
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
        auto& a = fragments[k % kFragments];
        const uint64_t b = operand(k);
        fill(a, k);
        if (k + 1 >= kFragments) {
            kittens::warpgroup::mma_async_wait<kFragments - 2>();
            pin(fragments[(k + 1) % kFragments]);
        }
        pin(a);
        wgmma_fence();
        multiply(a, b, k);
        commit();
    }
    meanwhile();
    kittens::warpgroup::mma_async_wait<0>();
#pragma unroll
    for (auto& a : fragments) pin(a);
    pin(out);
}

// out = state B^T. The warpgroup's state is in registers as kTiles tiles side by side and is rounded to
// operands of 16 columns. operand, commit, meanwhile: as in multiply_in_turns.
template <class Out, class State, int kTiles, class A, int kFragments, class Operand, class Commit,
          class Meanwhile>
__device__ inline void read_state(Out& out, const State (&state)[kTiles], A (&fragments)[kFragments],
                                  Operand operand, Commit commit, Meanwhile meanwhile) {
    multiply_in_turns<kTiles * State::width>(
        out, fragments, [&](A& a, int k) { convert_fragment(a, state[k / State::width], k % State::width); },
        operand, [&](const A& a, uint64_t b, int k) { wgmma_step<false>(out, a, 0, b, k > 0); }, commit,
        meanwhile);
}

// instruction(type) with the PTX name of T.
#define TFLA_BY_TYPE(T, instruction)                \
    if constexpr (std::is_same_v<T, kittens::bf16>) \
        instruction("bf16");                        \
    else                                            \
        instruction("f16")

// d (+)= A B^T for 72 rows of B, both in shared memory with columns as k: one step of k = 16. `more` holds
// the lane's two columns from 64 on, for rows lane / 4 and + 8; the first lane of every four has columns 64
// and 65.
template <class T, class D>
__device__ inline void wgmma_step_72(D& d, float2 (&more)[2], uint64_t a, uint64_t b,
                                     bool accumulate = true) {
    static_assert(D::width == 4 && D::height == 1);
    auto& t = d.tiles[0];
#define TFLA_ACCUMULATORS(j)                                                                \
    "+f"(t[j].data[0].x), "+f"(t[j].data[0].y), "+f"(t[j].data[1].x), "+f"(t[j].data[1].y), \
        "+f"(t[j].data[2].x), "+f"(t[j].data[2].y), "+f"(t[j].data[3].x), "+f"(t[j].data[3].y)
#define TFLA_WGMMA_72(type)                                                                       \
    asm volatile(                                                                                 \
        "{\n"                                                                                     \
        ".reg .pred accumulate;\n"                                                                \
        "setp.ne.b32 accumulate, %38, 0;\n"                                                       \
        "wgmma.mma_async.sync.aligned.m64n72k16.f32." type "." type                               \
        " "                                                                                       \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "       \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "        \
        "%34, %35}, %36, %37, accumulate, 1, 1, 0, 0;\n"                                          \
        "}\n"                                                                                     \
        : TFLA_ACCUMULATORS(0), TFLA_ACCUMULATORS(1), TFLA_ACCUMULATORS(2), TFLA_ACCUMULATORS(3), \
          "+f"(more[0].x), "+f"(more[0].y), "+f"(more[1].x), "+f"(more[1].y)                      \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))                                       \
        : "memory")
    TFLA_BY_TYPE(T, TFLA_WGMMA_72);
#undef TFLA_WGMMA_72
#undef TFLA_ACCUMULATORS
}

// Descriptor of eight rows of a wgmma operand without swizzle. Memory holds blocks of 8 columns of k, each
// kRows rows of 16 bytes; an operand may start at any row and then runs into the first rows of the next
// block. Computed once, as Operand128B.
struct OperandRows16B {
    static constexpr int kRows = 8;
    static constexpr uint32_t kBytes = kRows * 16;  // of a block of 8 columns of k
    uint32_t low;

    __device__ inline explicit OperandRows16B(const void* operand)
        : low((shared_address(operand) & 0x3FFFF) >> 4 | (kBytes >> 4) << 16) {}

    __device__ inline uint64_t at(int row, int step) const {
        return static_cast<uint64_t>(128 >> 4) << 32 | (low + (step * 2 * kBytes + row * 16) / 16);
    }
};

// d (+)= A B^T for eight rows of B, one step of k = 16; A's columns are M. d: rows lane / 4 and + 8, columns
// 2 (lane % 4) and the next one.
template <class T>
__device__ inline void wgmma_step_8(float2 (&d)[2], uint64_t a, uint64_t b, bool accumulate = true) {
#define TFLA_WGMMA_8(type)                                         \
    asm volatile(                                                  \
        "{\n"                                                      \
        ".reg .pred accumulate;\n"                                 \
        "setp.ne.b32 accumulate, %6, 0;\n"                         \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type \
        " "                                                        \
        "{%0, %1, %2, %3}, %4, %5, accumulate, 1, 1, 1, 0;\n"      \
        "}\n"                                                      \
        : "+f"(d[0].x), "+f"(d[0].y), "+f"(d[1].x), "+f"(d[1].y)   \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))        \
        : "memory")
    TFLA_BY_TYPE(T, TFLA_WGMMA_8);
#undef TFLA_WGMMA_8
}

// d += A B^T, A from registers.
template <class T, class A> __device__ inline void wgmma_step_8(float2 (&d)[2], const A& a, uint64_t b) {
    const auto& x = reinterpret_cast<const uint32_t (&)[4]>(a.tiles[0][0].data);
#define TFLA_WGMMA_8(type)                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type \
                 " "                                                        \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;\n"    \
                 : "+f"(d[0].x), "+f"(d[0].y), "+f"(d[1].x), "+f"(d[1].y)   \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(b)       \
                 : "memory")
    TFLA_BY_TYPE(T, TFLA_WGMMA_8);
#undef TFLA_WGMMA_8
}

#undef TFLA_BY_TYPE

}  // namespace tfla_tk
