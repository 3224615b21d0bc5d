// Loads of gates from global memory: of single tokens or of a chunk (GateRows), one chunk ahead (GateStream),
// or any number of chunks ahead (GateCopies).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/operand.h"
#include "common/sync.cuh"
#include "kittens.cuh"
#include "sequence/cut.h"

namespace tfla_tk {

__device__ inline float load_gate(const Gate& gate, int64_t offset) {
    switch (gate.dtype) {
        case DType::bfloat16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(gate.data)[offset]);
        case DType::float16:
            return __half2float(static_cast<const __half*>(gate.data)[offset]);
        default:
            return static_cast<const float*>(gate.data)[offset];
    }
}

// Stores the number of a (batch, head)'s row, rounded to the gate's type.
__device__ inline void store_gate(const Gate& gate, int batch, int head, int row, float x) {
    const int64_t offset = batch * gate.batch_stride + head * gate.head_stride + row * gate.row_stride;
    switch (gate.dtype) {
        case DType::bfloat16:
            static_cast<__nv_bfloat16*>(const_cast<void*>(gate.data))[offset] = __float2bfloat16(x);
            break;
        case DType::float16:
            static_cast<__half*>(const_cast<void*>(gate.data))[offset] = __float2half(x);
            break;
        default:
            static_cast<float*>(const_cast<void*>(gate.data))[offset] = x;
    }
}

// The gates of one (batch, head), starting at a row.
struct GateRows {
    const Gate& gate;
    int64_t offset;

    __device__ inline GateRows(const Gate& gate, int batch, int head, int row)
        : gate(gate), offset(batch * gate.batch_stride + head * gate.head_stride + row * gate.row_stride) {}

    __device__ inline float operator[](int t) const { return load_gate(gate, offset + t * gate.row_stride); }

    // The gates of this lane's two tokens of a chunk; `none` past `tokens`.
    __device__ inline float2 pair(int chunk, int tokens, float none) const {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        return {t < tokens ? (*this)[t] : none, t + 1 < tokens ? (*this)[t + 1] : none};
    }
};

// A Gate as GateStream and GateCopies read it: strides in bytes, and how to extract a number from an aligned
// 32-bit word.
// NOTES: computed on the host, since operands from the constant bank cost the gate warp neither instructions
// nor registers.
struct GateWords {
    const char* data;
    int64_t batch_bytes, head_bytes, row_bytes, chunk_bytes;
    // Selectors for __byte_perm, in which 4 is a byte of zeros: for a number at the word's start, and the
    // increment per byte for one that starts later. fp32 takes all four bytes, bf16 two as the upper half,
    // fp16 two as the lower half.
    uint32_t bytes, a_byte_later;
    bool is_half;

    __host__ explicit GateWords(const Gate& gate)
        : data(static_cast<const char*>(gate.data)), is_half(gate.dtype == DType::float16) {
        const bool is_float = gate.dtype == DType::float32;
        const int64_t size = is_float ? 4 : 2;
        batch_bytes = gate.batch_stride * size, head_bytes = gate.head_stride * size;
        row_bytes = gate.row_stride * size, chunk_bytes = kChunk * row_bytes;
        bytes = is_float ? 0x3210 : is_half ? 0x4410 : 0x1044;
        a_byte_later = is_half ? 0x11 : 0x1100;
    }

    // The address of the gate of a (batch, head)'s token t, counted from a row.
    __device__ inline const char* at(int batch, int head, int row, int t) const {
        return data + batch * batch_bytes + head * head_bytes + (row + t) * row_bytes;
    }
    // The selector of __byte_perm for the number at an address.
    __device__ inline uint32_t selector(const char* at) const {
        const auto byte = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) & 2;  // 0 or 2
        return bytes + byte * a_byte_later;
    }
    __device__ inline float number(uint32_t word, uint32_t selector) const {
        const uint32_t bits = __byte_perm(word, 0, selector);
        const float of_half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        return is_half ? of_half : __uint_as_float(bits);
    }
    // The address of the aligned word with the number at an address.
    __device__ static inline uintptr_t word_of(const char* at) {
        return reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3};
    }
};

// A gate's values of the lane's two tokens, chunk by chunk, loaded one chunk before they are used. NOTES: a
// load is waited for as soon as its register is converted or moved (as after a branch). So raw 32-bit words
// are loaded, and converted when they are used. The word of a 16-bit number also holds its neighbour, or the
// two bytes past the end of the tensor.
struct GateStream {
    const GateWords& gate;
    const char* at;  // address of the gate of the first of the two tokens
    uint32_t first = 0, second = 0;

    __device__ inline GateStream(const GateWords& gate, int batch, int head, int row, int tokens)
        : gate(gate) {
        const int t = 2 * fresh_laneid();
        at = gate.at(batch, head, row, t);
        load(t, tokens);
    }

    // Returns a chunk's gates, `none` past `tokens`, and starts to load the next chunk's.
    __device__ inline float2 take(int chunk, int tokens, float none) {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        const float2 taken{t < tokens ? number(first, at) : none,
                           t + 1 < tokens ? number(second, at + gate.row_bytes) : none};
        at += gate.chunk_bytes;
        load(t + kChunk, tokens);
        return taken;
    }

  private:
    __device__ inline void load(int t, int tokens) {
        auto load_word = [&](uint32_t& word, const char* at, int t) {
            asm volatile("{.reg .pred p; setp.lt.s32 p, %2, %3; @p ld.global.nc.b32 %0, [%1];}"
                         : "+r"(word)
                         : "l"(GateWords::word_of(at)), "r"(t), "r"(tokens));
        };
        load_word(first, at, t), load_word(second, at + gate.row_bytes, t + 1);
    }
    __device__ inline float number(uint32_t word, const char* at) const {
        return gate.number(word, gate.selector(at));
    }
};

// The same for chunks in any order. Copies to shared memory may be started any number of chunks ahead; a lane
// copies what it reads itself. NOTES: while a stage's tiles are loaded, a load of gates takes longer than the
// walk of a chunk. Registers cannot hold several chunks: to move one to another waits for its load.
struct GateCopies {
    using Words = uint2[32];  // of a chunk
    const GateWords& gate;
    const char* at;                // address of the gate of the first of the lane's two tokens of chunk 0
    uint32_t of_first, of_second;  // selectors, the same in every chunk

    __device__ inline GateCopies(const GateWords& gate, int batch, int head, int row)
        : gate(gate),
          at(gate.at(batch, head, row, 2 * fresh_laneid())),
          of_first(gate.selector(at)),
          of_second(gate.selector(at + gate.row_bytes)) {}

    // Starts the loads of a chunk to shared memory or to registers. Zeros where there is no token: before
    // chunk 0 or past `tokens`.
    __device__ inline void start(Words& words, int chunk, int tokens) const {
        auto copy = [](uint32_t* place, uintptr_t word, bool is_there) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                         :
                         : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))), "l"(word),
                           "r"(is_there ? 4 : 0)
                         : "memory");
        };
        uint2& own = words[fresh_laneid()];
        for_both(own, chunk, tokens, copy);
    }
    __device__ inline void start(uint2& words, int chunk, int tokens) const {
        for_both(words, chunk, tokens, [](uint32_t* place, uintptr_t word, bool is_there) {
            asm volatile(
                "{\n"
                ".reg .pred there;\n"
                "setp.ne.u32 there, %2, 0;\n"
                "mov.b32 %0, 0;\n"
                "@there ld.global.nc.b32 %0, [%1];\n"
                "}\n"
                : "=&r"(*place)
                : "l"(word), "r"(static_cast<uint32_t>(is_there)));
        });
    }
    // The gates of a chunk whose loads are done.
    __device__ inline float2 of(const Words& words) const { return of(words[fresh_laneid()]); }
    __device__ inline float2 of(const uint2& pair) const {
        return {gate.number(pair.x, of_first), gate.number(pair.y, of_second)};
    }

  private:
    template <class Load>
    __device__ inline void for_both(uint2& words, int chunk, int tokens, Load load) const {
        const int t = chunk * kChunk + 2 * fresh_laneid();
        const char* const first = at + chunk * gate.chunk_bytes;
        auto is_there = [&](int t) { return t >= 0 && t < tokens; };
        load(&words.x, GateWords::word_of(first), is_there(t));
        load(&words.y, GateWords::word_of(first + gate.row_bytes), is_there(t + 1));
    }
};

// Ends a group of this thread's copies; waits until no more than kNewest groups are under way.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest = 0> __device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

}  // namespace tfla_tk
