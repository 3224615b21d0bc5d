// Products of 16 x 8 numbers by 8 x 8, with operands of 22 significant bits on the tf32 tensor cores.
#pragma once

#include "decode/mlstm/mma.cuh"

namespace tfla_tk::decode {

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

}  // namespace tfla_tk::decode
