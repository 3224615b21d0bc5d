// Numbers of the decoding kernels: the state by fours, of a type that is compiled, all else of run-time
// dtypes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decode/params.h"

namespace tfla_tk::decode {

// Four neighbours of a state, as one word. It is read once: past the L1 cache.
template <class State> using Four = std::conditional_t<sizeof(State) == 4, float4, uint2>;

template <class State> __device__ inline Four<State> load_four(const State* from) {
    return __ldcg(reinterpret_cast<const Four<State>*>(from));
}
template <class State> __device__ inline void store_four(State* to, Four<State> x) {
    __stcg(reinterpret_cast<Four<State>*>(to), x);
}

// Copies four neighbours to shared memory. The thread that asked for them, and no other, finds them there
// behind wait_for_copies.
template <class State> __device__ inline void copy_four(Four<State>* to, const State* from) {
#ifdef __CUDA_ARCH__
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (sizeof(State) == 4)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
#else
    *to = load_four(from);
#endif
}
__device__ inline void wait_for_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <class Half> __device__ inline float2 widen_pair(unsigned bits) {
    if constexpr (std::is_same_v<Half, __half>)
        return {__half2float(__ushort_as_half(bits & 0xffff)), __half2float(__ushort_as_half(bits >> 16))};
    else
        return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
template <class Half> __device__ inline unsigned narrow_pair(float low, float high) {
    if constexpr (std::is_same_v<Half, __half>)
        return __half_as_ushort(__float2half_rn(low)) | __half_as_ushort(__float2half_rn(high)) << 16;
    else
        return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
               __bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
}

template <class State> __device__ inline void widen(float (&to)[4], Four<State> x) {
    if constexpr (sizeof(State) == 4) {
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
        const float2 low = widen_pair<State>(x.x), high = widen_pair<State>(x.y);
        to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    }
}
template <class State> __device__ inline Four<State> narrow(const float (&x)[4]) {
    if constexpr (sizeof(State) == 4)
        return make_float4(x[0], x[1], x[2], x[3]);
    else
        return make_uint2(narrow_pair<State>(x[0], x[1]), narrow_pair<State>(x[2], x[3]));
}

template <class T> __device__ inline void advance(T*& pointer, std::int64_t elements) {
    pointer += elements;
#ifdef __CUDA_ARCH__
    // NOTES: opaque to the compiler, which would otherwise keep one address per load in flight, and spill
    asm volatile("" : "+l"(pointer));
#endif
}

// A number of run-time dtype is loaded as bits and converted when it is used, so that no load waits for
// another.
__device__ inline unsigned load_bits(const void* data, DType dtype, std::int64_t at) {
    if (dtype == DType::float32) return static_cast<const unsigned*>(data)[at];
    return static_cast<const unsigned short*>(data)[at];
}
// Those at `at`, at + 32 and so on.
template <int N>
__device__ inline void load_bits(unsigned (&to)[N], const void* data, DType dtype, std::int64_t at) {
    if (dtype == DType::float32) {
#pragma unroll
        for (int n = 0; n < N; n++) to[n] = static_cast<const unsigned*>(data)[at + n * 32];
    } else {
#pragma unroll
        for (int n = 0; n < N; n++) to[n] = static_cast<const unsigned short*>(data)[at + n * 32];
    }
}
__device__ inline float number_of(unsigned bits, DType dtype) {
    const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    return dtype == DType::float16 ? half : __uint_as_float(dtype == DType::bfloat16 ? bits << 16 : bits);
}

__device__ inline std::int64_t start_of(const Numbers& x, int batch, int token, int head) {
    return batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
}
template <class T> __device__ inline T narrowed(float x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return __float2bfloat16_rn(x);
    else if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(x);
    else
        return x;
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

__device__ inline void store_output(const DecodeParams& p, std::int64_t at, float x) {
    store_number(const_cast<void*>(p.o.data), p.o.dtype, at, x);
}

}  // namespace tfla_tk::decode
