// Numbers of mLSTM's decoding kernels: the state by words of a type that is compiled, all else of run-time
// dtypes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/mlstm/params.h"
#include "decode/numbers.cuh"

namespace tfla_tk::decode {

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widened(__half x) { return __half2float(x); }

// A number of run-time dtype, loaded as the aligned word that holds it and converted when it is used. NOTES:
// a branch, or two loads under opposite predicates, would wait for one number before the next one is loaded.
struct Number {
    unsigned word;
    bool upper;  // half of the word
    DType dtype;

    __device__ inline Number(const void* data, DType dtype, std::int64_t at) : dtype(dtype) {
        const char* from = static_cast<const char*>(data) + (at << (dtype == DType::float32 ? 2 : 1));
        const int behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) & 2);
        upper = behind != 0;
        word = *reinterpret_cast<const unsigned*>(from - behind);
    }
    __device__ inline operator float() const {
        const unsigned half = upper ? word >> 16 : word & 0xffff;
        const float wide = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
        return dtype == DType::float16 ? wide : __uint_as_float(dtype == DType::bfloat16 ? half << 16 : word);
    }
};

__device__ inline Number gate_of(const Gate& x, std::int64_t batch, std::int64_t head, int token) {
    return {x.data, x.dtype, batch * x.batch_stride + head * x.head_stride + token * x.row_stride};
}

// kWidth neighbours of a row of C, moved as one word, past the L1 cache. NOTES: streaming accesses (.cs) are
// slower.
template <class T, int kWidth> struct Columns {
    static constexpr int kBytes = sizeof(T) * kWidth;
    using Word = std::conditional_t<
        kBytes == 16, uint4,
        std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;
    static_assert(sizeof(Word) == kBytes);

    Word word;

    __device__ inline void load(const T* from) { word = __ldcg(reinterpret_cast<const Word*>(from)); }
    __device__ inline void store(T* to) const { __stcg(reinterpret_cast<Word*>(to), word); }
    __device__ inline float operator[](int n) const { return widened(reinterpret_cast<const T*>(&word)[n]); }
    __device__ inline void set(int n, float x) { reinterpret_cast<T*>(&word)[n] = narrowed<T>(x); }
};

// Of a power of two. NOTES: a template, since the host half, which only parses it, knows no __ffs.
template <class X> __device__ inline int log2_of(X x) { return __ffs(x) - 1; }

}  // namespace tfla_tk::decode
