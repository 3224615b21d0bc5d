// Numbers of mLSTM's decoding kernels: the state by words of a type that is compiled, all else of run-time
// dtypes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/mlstm/params.h"

namespace tfla_tk::decode {

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widened(__half x) { return __half2float(x); }

template <class T> __device__ inline T narrowed(float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return __float2bfloat16_rn(x);
    else if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(x);
    else
        return x;
}

// x as a number of this dtype.
__device__ inline float rounded(DType dtype, float x) {
    switch (dtype) {
        case DType::bfloat16:
            return widened(narrowed<__nv_bfloat16>(x));
        case DType::float16:
            return widened(narrowed<__half>(x));
        default:
            return x;
    }
}

__device__ inline void store_number(void* data, DType dtype, std::int64_t at, float x) {
    switch (dtype) {
        case DType::bfloat16:
            static_cast<__nv_bfloat16*>(data)[at] = narrowed<__nv_bfloat16>(x);
            break;
        case DType::float16:
            static_cast<__half*>(data)[at] = narrowed<__half>(x);
            break;
        default:
            static_cast<float*>(data)[at] = x;
    }
}

// Numbers of one run-time dtype, loaded as the aligned words that hold them and converted when they are used.
// NOTES: a branch, or two loads under opposite predicates, would wait for one number before the next one is
// loaded.
template <int N> struct Loaded {
    unsigned words[N];
    unsigned upper = 0;  // a bit per number: it is the upper half of its word
    DType dtype;

    __device__ inline explicit Loaded(DType dtype) : dtype(dtype) {}
    __device__ inline Loaded(const void* data, DType dtype, std::int64_t at) : dtype(dtype) {
        static_assert(N == 1);
        load(0, static_cast<const char*>(data) + bytes(at));
    }
    // Of so many numbers.
    __device__ inline std::int64_t bytes(std::int64_t count) const {
        return count << (dtype == DType::float32 ? 2 : 1);
    }
    __device__ inline void load(int n, const char* from) {
        const auto behind = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) & 2);
        upper |= behind / 2 << n;
        words[n] = *reinterpret_cast<const unsigned*>(from - behind);
    }
    __device__ inline float operator[](int n) const {
        const unsigned half = upper >> n & 1 ? words[n] >> 16 : words[n] & 0xffff;
        const float wide = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
        const float other = __uint_as_float(dtype == DType::bfloat16 ? half << 16 : words[n]);
        return dtype == DType::float16 ? wide : other;
    }
};

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

}  // namespace tfla_tk::decode
