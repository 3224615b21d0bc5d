// O of a launch's channels of K, which it leaves for the launch of the next ones. That one begins its sums
// with it, so O is rounded once.
//
// A warp has 16 columns of O and the 64 tokens of a chunk; a lane has 16 numbers of each of two columns. The
// same lane of the next launch needs the same numbers, so each lane stores its own, in units of 16 bytes. The
// warp's accesses are whole lines, without shared memory.
//   bf16  numbers are left in fp16, scaled so that the largest of a lane's column is 2^14 to 2^15: an error
//         of 2^-12, an eighth of that of bf16. Numbers of 2^-28 of the largest still have these digits.
//   fp16  numbers are left in fp32: fp16 would round as coarsely as the result, and memory does not bound
//         these calls.
#pragma once

#include "channel_gate/forward/config.cuh"

namespace tfla_tk::channel_gate {

// Of a warp's 16 columns and a chunk, in global memory.
template <class T> struct alignas(128) PartOfWarp {
    static constexpr bool kIsScaled = false;
    static constexpr int kUnits = kChunk / 8;
    uint4 units[kUnits][32];
};
template <> struct alignas(128) PartOfWarp<kittens::bf16> {
    static constexpr bool kIsScaled = true;
    static constexpr int kUnits = kChunk / 16;
    uint4 units[kUnits][32];
    uint16_t exponents[32];  // of the largest numbers of a lane's columns, biased by 128, 16 at least
};

using OutOfWarp = rt_fl<16, kChunk>;  // O^T of a warp

// A part from its load to its use: it waits in the registers of O^T. NOTES: in others it would not find room.
// The loads are volatile, so that they stay where they are, ahead of the use.
template <class T> struct WaitingPart {
    using Memory = PartOfWarp<T>;
    uint32_t exponents;

    __device__ inline void load(const Memory& from, OutOfWarp& out) {
        const int lane = fresh_laneid();
        each<0, Memory::kUnits>([&](int i) {
            auto [x, y] = pairs_of(out, i);
            asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                         : "=f"(x.x), "=f"(x.y), "=f"(y.x), "=f"(y.y)
                         : "l"(&from.units[i][lane]));
        });
        if constexpr (Memory::kIsScaled) {
            uint16_t bits;
            asm volatile("ld.global.cs.u16 %0, [%1];\n" : "=h"(bits) : "l"(&from.exponents[lane]));
            exponents = bits;
        }
    }
    __device__ inline void put(OutOfWarp& out) const {
        if constexpr (Memory::kIsScaled) {
            float scale[2];
            each<0, 2>([&](int n) { scale[n] = __uint_as_float(((exponents >> 8 * n & 0xff) - 15) << 23); });
            each<0, Memory::kUnits>([&](int i) {
                auto [x, y] = pairs_of(out, i);
                const float words[4] = {x.x, x.y, y.x, y.y};
                each<0, 4>([&](int n) {
                    const float2 z = to_float2(reinterpret_cast<const half_2&>(words[n]));
                    out.tiles[0][i].data[n] = {z.x * scale[n % 2], z.y * scale[n % 2]};
                });
            });
        }
    }

  private:
    struct Pairs {
        float2 &x, &y;
    };
    // Where the i-th unit waits.
    static __device__ inline Pairs pairs_of(OutOfWarp& out, int i) {
        auto& tile = out.tiles[0][i / (Memory::kUnits / 4)].data;
        const int first = i % (Memory::kUnits / 4) * 2;
        return {tile[first], tile[first + 1]};
    }
};

// Stores a warp's part. NOTES: infinities and NaN do not count as the largest number; else the finite ones of
// their column would be lost.
template <class T> __device__ inline void leave_part(PartOfWarp<T>& to, const OutOfWarp& out) {
    const int lane = fresh_laneid();
    auto pair = [&](int i) { return out.tiles[0][i / 4].data[i % 4]; };
    if constexpr (PartOfWarp<T>::kIsScaled) {
        uint32_t largest[2] = {0, 0};
        auto consider = [](uint32_t& found, float x) {
            found = max(found, 2 * __float_as_uint(x) + 0x01000000);
        };
        each<0, kChunk / 4>([&](int i) {
            const float2 x = pair(i);
            consider(largest[i % 2], x.x), consider(largest[i % 2], x.y);
        });
        uint32_t exponents[2];
        float scale[2];
        each<0, 2>([&](int n) {
            exponents[n] = max(largest[n] >> 24, 16);
            scale[n] = __uint_as_float((269 - exponents[n]) << 23);
        });
        each<0, kChunk / 16>([&](int j) {
            half_2 x[4];
            each<0, 4>([&](int n) {
                const float2 y = pair(4 * j + n);
                x[n] = from_float2<half_2>({y.x * scale[n % 2], y.y * scale[n % 2]});
            });
            __stcs(&to.units[j][lane], reinterpret_cast<const uint4&>(x));
        });
        __stcs(&to.exponents[lane], static_cast<uint16_t>(exponents[0] | exponents[1] << 8));
    } else {
        each<0, PartOfWarp<T>::kUnits>([&](int i) {
            const float2 x = pair(2 * i), y = pair(2 * i + 1);
            __stcs(&to.units[i][lane], uint4{__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(y.x),
                                             __float_as_uint(y.y)});
        });
    }
}

}  // namespace tfla_tk::channel_gate
