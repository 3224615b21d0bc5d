// Shared by the decoding kernels: numbers of run-time dtype, loads and stores of the state that bypass L1,
// and the slices of a head as one cluster.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "kittens.cuh"
#include "scalar_gate/bindings/params_decode.h"

namespace tfla_tk::mlstm {

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

// A stabiliser rounded to the dtype in which it is stored. In 16 bits it is at least kLeast: C and n are
// rescaled by its rounding error, which would otherwise exceed the range of fp32.
__device__ inline float stored_stabiliser(DType dtype, float m) {
    constexpr float kLeast = -16384.f;
    const float x = m < kLeast ? kLeast : m;  // NaN stays
    switch (dtype) {
        case DType::bfloat16:
            return widened(narrowed<__nv_bfloat16>(x));
        case DType::float16:
            return widened(narrowed<__half>(x));
        default:
            return m;
    }
}

__device__ inline void store_number(void* data, DType dtype, int64_t offset, float x) {
    switch (dtype) {
        case DType::bfloat16:
            static_cast<__nv_bfloat16*>(data)[offset] = narrowed<__nv_bfloat16>(x);
            break;
        case DType::float16:
            static_cast<__half*>(data)[offset] = narrowed<__half>(x);
            break;
        default:
            static_cast<float*>(data)[offset] = x;
    }
}

// A number of run-time dtype, loaded as the aligned word that holds it and converted when it is used. NOTES:
// a branch, or two loads under opposite predicates, would wait for one number before the next one is loaded.
struct Number {
    unsigned word;
    bool upper;  // half of the word
    DType dtype;

    __device__ inline Number(const void* data, DType dtype, int64_t offset) : dtype(dtype) {
        const char* at = static_cast<const char*>(data) + (offset << (dtype == DType::float32 ? 2 : 1));
        const int behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(at) & 2);
        upper = behind != 0;
        word = *reinterpret_cast<const unsigned*>(at - behind);
    }
    __device__ inline operator float() const {
        const unsigned half = upper ? word >> 16 : word & 0xffff;
        const float wide = __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
        return dtype == DType::float16 ? wide : __uint_as_float(dtype == DType::bfloat16 ? half << 16 : word);
    }
};

// kWidth neighbours of a row of C, moved as one word, bypassing L1. NOTES: streaming accesses (.cs) are
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

// NOTES: opaque to the compiler, which would otherwise keep one address per load in flight, and spill.
template <class T> __device__ inline void advance(T*& pointer, int64_t elements) {
    pointer += elements;
    asm volatile("" : "+l"(pointer));
}

inline std::int64_t bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

template <class X> void move(X*& data, std::int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<X>, const char, char>;
    if (data != nullptr) data = reinterpret_cast<Byte*>(data) + bytes;
}
inline void move(Gate& x, std::int64_t batch, std::int64_t head) {
    move(x.data, (batch * x.batch_stride + head * x.head_stride) * bytes_of(x.dtype));
}

// Restricts a call to some of its heads, except for q, k, v and h.
template <class Params>
void take_part(Params& p, std::int64_t batch, std::int64_t head, int batches, int heads) {
    const std::int64_t index = batch * p.heads + head, keys = p.dim_qk;
    move(p.i, batch, head), move(p.f, batch, head);
    for (StoredState* state : {&p.before, &p.after}) {
        move(state->c, index * keys * p.dim_v * bytes_of(state->c_dtype));
        move(state->n, index * keys * bytes_of(state->n_dtype));
        move(state->m, index * bytes_of(state->m_dtype));
    }
    p.batch = batches, p.heads = heads;
}

// Launches one CTA per slice of every head; for in-place calls the slices of a head form a cluster. A grid
// holds 65,535 heads and batch entries; more take several launches. move_tokens(p, batch, head, index) makes
// q, k, v and h start at a head, the `index`-th of all.
template <auto kKernel, class Params, class MoveTokens>
void launch_slices(const Params& p, int slices, int threads, cudaStream_t stream, const char* name,
                   MoveTokens move_tokens) {
    constexpr int kMost = 65535;
    if (p.in_place && slices > kDecodeMaxSlices)
        throw std::invalid_argument(std::string(name) + ": too many slices");
    const int batches = p.heads > kMost ? 1 : kMost;
    for (int batch = 0; batch < p.batch; batch += batches) {
        for (int head = 0; head < p.heads; head += kMost) {
            Params part = p;
            move_tokens(part, batch, head, static_cast<std::int64_t>(batch) * p.heads + head);
            take_part(part, batch, head, std::min(batches, p.batch - batch), std::min(kMost, p.heads - head));
            launch<kKernel>(part, dim3(slices, part.heads, part.batch), threads, p.device, stream, name,
                            p.in_place ? slices : 1);
        }
    }
}

// Calls run<Before, After>() with the types of C before and after: equal, or fp32 and 16 bits.
template <class Run> void with_state_types(DType before, DType after, const char* name, Run run) {
    const auto with_half = [&]<class Half>(Half) {
        if (before == after)
            run.template operator()<Half, Half>();
        else if (before == DType::float32)
            run.template operator()<float, Half>();
        else if (after == DType::float32)
            run.template operator()<Half, float>();
        else
            throw std::invalid_argument(std::string(name) + ": no kernel between two dtypes of 16 bits");
    };
    if (before == DType::bfloat16 || after == DType::bfloat16)
        with_half(__nv_bfloat16{});
    else if (before == DType::float16 || after == DType::float16)
        with_half(__half{});
    else
        run.template operator()<float, float>();
}

}  // namespace tfla_tk::mlstm
