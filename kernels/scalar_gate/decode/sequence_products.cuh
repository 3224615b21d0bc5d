// Products of 16 x 8 numbers by 8 x 8, with operands of 22 significant bits on the tf32 tensor cores.
//
// Register layout of mma.m16n8k8 for lane 4 g + t (g < 8, t < 4):
//   a  [16 x 8]: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   b  [8 x 8]: (t, g), (t + 4, g)
//   d  [16 x 8]: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
#pragma once

#include "kittens.cuh"

namespace tfla_tk::mlstm {

// d += a b
__device__ inline void multiply_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// kRegisters numbers of an operand. A number with more than 11 significant bits is split into a high and a
// low tf32 part; 16-bit numbers need no low part.
template <int kRegisters, bool kHasLow> struct TensorOperand {
    static constexpr unsigned kKept = 0xffffe000;  // bits of tf32

    unsigned high[kRegisters];
    unsigned low[kHasLow ? kRegisters : 1];

    __device__ inline void set(int n, float x) {
        high[n] = __float_as_uint(x);
        if constexpr (kHasLow) {
            high[n] &= kKept;
            low[n] = __float_as_uint(x - __uint_as_float(high[n])) & kKept;
        }
    }
};

// d += a b, without the product of the low parts
template <bool kLowA, bool kLowB>
__device__ inline void multiply(float (&d)[4], const TensorOperand<4, kLowA>& a,
                                const TensorOperand<2, kLowB>& b) {
    if constexpr (kLowA) multiply_tf32(d, a.low, b.high);
    if constexpr (kLowB) multiply_tf32(d, a.high, b.low);
    multiply_tf32(d, a.high, b.high);
}

}  // namespace tfla_tk::mlstm
