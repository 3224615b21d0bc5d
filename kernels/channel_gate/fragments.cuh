// A warp's products of rows in shared memory by mma.sync, and its loads and stores of two columns per lane.
// Rows are 128 bytes, the 16-byte units of row t of eight XORed with t: the layout of a panel.
#pragma once

#include "common/tiles.cuh"
#include "kittens.cuh"

namespace tfla_tk::channel_gate {

using namespace kittens;

// Four 8 x 8 matrices of an operand of mma.sync. NOTES: their order decides whether HMMA takes the registers
// as they come: A wants four in a row, B two.
template <class T2> struct Fragment {
    T2 x[4];
    Fragment() = default;
    __device__ __forceinline__ explicit Fragment(uint32_t address) {
        move<T2>::ldsm4(x[0], x[1], x[2], x[3], address);
    }
    __device__ static __forceinline__ Fragment transposed(uint32_t address) {
        Fragment f;
        move<T2>::ldsm4t(f.x[0], f.x[1], f.x[2], f.x[3], address);
        return f;
    }
    __device__ __forceinline__ uint32_t bits(int i) const { return reinterpret_cast<const uint32_t&>(x[i]); }
};

// The same of fp32, four columns in place of eight: an operand of products in tf32.
struct FloatFragment {
    uint32_t x[4];
    FloatFragment() = default;
    __device__ __forceinline__ explicit FloatFragment(uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    }
    __device__ __forceinline__ uint32_t bits(int i) const { return x[i]; }

    // A of eight rows as B of the same rows (EightRows in block.cuh).
    __device__ __forceinline__ FloatFragment as_b_of_eight() const {
        FloatFragment b;
        b.x[0] = x[0], b.x[1] = x[2], b.x[2] = x[1], b.x[3] = x[3];
        return b;
    }
    // What tf32 products see of each number, and what they drop.
    __device__ __forceinline__ FloatFragment high() const {
        FloatFragment part;
#pragma unroll
        for (int i = 0; i < 4; i++) part.x[i] = x[i] & ~0x1FFFu;
        return part;
    }
    __device__ __forceinline__ FloatFragment low() const {
        FloatFragment part;
#pragma unroll
        for (int i = 0; i < 4; i++)
            part.x[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(x[i] & ~0x1FFFu));
        return part;
    }
};

// Products in tf32 drop the last 13 bits of an operand. Times this, the loss is zero in the mean, and numbers
// of bf16 and fp16 are still exact.
constexpr float kTf32Mean = 1.f + 0.72f / 2048.f;

// instruction(type) with the PTX name of T2's elements.
#define TFLA_BY_PAIR(T2, instruction)                  \
    if constexpr (std::is_same_v<T2, kittens::bf16_2>) \
        instruction("bf16");                           \
    else                                               \
        instruction("f16")

// What a product adds to. NOTES: zeros as operands cost nothing, zeroed accumulators a move each.
struct Addend {
    float x[4];
    __device__ __forceinline__ Addend(const float (&c)[4], bool accumulate) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = accumulate ? c[i] : 0.f;
    }
};

// c (+)= a b^T: 16 rows of a with eight of b, k = 16. b has 16 rows; `eight` chooses the first or last ones.
template <class T2>
__device__ __forceinline__ void multiply_16(float (&c)[4], const Fragment<T2>& a, const Fragment<T2>& b,
                                            int eight, bool accumulate) {
    const Addend z(c, accumulate);
#define TFLA_MMA_16(type)                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                    \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"              \
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                          \
                 : "r"(a.bits(0)), "r"(a.bits(1)), "r"(a.bits(2)), "r"(a.bits(3)), "r"(b.bits(2 * eight)), \
                   "r"(b.bits(2 * eight + 1)), "f"(z.x[0]), "f"(z.x[1]), "f"(z.x[2]), "f"(z.x[3]))
    TFLA_BY_PAIR(T2, TFLA_MMA_16);
#undef TFLA_MMA_16
}

#undef TFLA_BY_PAIR

// The same with fp32 numbers in tf32. k = 8; b has 16 rows.
__device__ __forceinline__ void multiply_16(float (&c)[4], const FloatFragment& a, const FloatFragment& b,
                                            int eight, bool accumulate) {
    const Addend z(c, accumulate);
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a.bits(0)), "r"(a.bits(1)), "r"(a.bits(2)), "r"(a.bits(3)), "r"(b.bits(2 * eight)),
          "r"(b.bits(2 * eight + 1)), "f"(z.x[0]), "f"(z.x[1]), "f"(z.x[2]), "f"(z.x[3]));
}
__device__ __forceinline__ uint32_t load_word(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_word(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}
template <class T2> __device__ __forceinline__ T2 load_pair_of(uint32_t address) {
    const uint32_t x = load_word(address);
    return reinterpret_cast<const T2&>(x);
}
template <class T2> __device__ __forceinline__ void store_pair_of(uint32_t address, T2 x) {
    store_word(address, reinterpret_cast<uint32_t&>(x));
}
template <class T2> __device__ __forceinline__ void store_rounded(uint32_t address, float2 x) {
    store_pair_of(address, from_float2<T2>(x));
}

__device__ __forceinline__ float2 load_floats(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_floats(uint32_t address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
// NOTES: not overloads of the above: braces around two numbers would choose the array, and write zeros behind
// them.
__device__ __forceinline__ void load_four(float (&x)[4], uint32_t address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void store_four(uint32_t address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

__device__ __forceinline__ float2 operator*(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 operator*(float2 x, float y) { return {x.x * y, x.y * y}; }
// NOTES: number by number: a choice between variables would put them into memory.
__device__ __forceinline__ float2 pick(bool first, float2 x, float2 y) {
    return {first ? x.x : y.x, first ? x.y : y.y};
}

// Two log gates of 16 bits, and e^g of two.
__device__ __forceinline__ float2 log_gates_of(uint32_t word, bool is_half) {
    const float2 x = to_float2(reinterpret_cast<const bf16_2&>(word));
    const float2 y = to_float2(reinterpret_cast<const half_2&>(word));
    return pick(is_half, y, x);
}
__device__ __forceinline__ float2 gates_of(float2 log) {
    constexpr float kLog2e = 1.44269504f;
    return {exp2f(log.x * kLog2e), exp2f(log.y * kLog2e)};
}

}  // namespace tfla_tk::channel_gate
