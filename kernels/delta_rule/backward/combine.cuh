// dq and dk where the walks leave several parts of each.
#pragma once

#include "common/kernel.cuh"
#include "common/tiles.cuh"
#include "delta_rule/bindings/params.h"

namespace tfla_tk::delta_rule {

constexpr int kCombineThreads = 256;
constexpr int kUnit = 8;  // numbers of a load

// One unit of a row, as fp32.
template <class T> struct Unit {
    using T2 = typename kittens::base_types::packing<T>::packed_type;
    float2 pairs[kUnit / 2] = {};

    __device__ inline void add_floats(const Operand& x, int64_t offset) {
        const float4* const from =
            reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + offset);
#pragma unroll
        for (int n = 0; n < kUnit / 4; n++) {
            const float4 y = from[n];
            pairs[2 * n].x += y.x, pairs[2 * n].y += y.y, pairs[2 * n + 1].x += y.z,
                pairs[2 * n + 1].y += y.w;
        }
    }
    __device__ inline void add(const Operand& x, int64_t offset) {
        const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const T*>(x.data) + offset);
        const T2* loaded = reinterpret_cast<const T2*>(&bits);
#pragma unroll
        for (int n = 0; n < kUnit / 2; n++) {
            const float2 y = to_float2(loaded[n]);
            pairs[n].x += y.x, pairs[n].y += y.y;
        }
    }
    __device__ inline void store(const Operand& x, int64_t offset) const {
        uint4 bits;
        T2* const rounded = reinterpret_cast<T2*>(&bits);
#pragma unroll
        for (int n = 0; n < kUnit / 2; n++) rounded[n] = from_float2<T2>(pairs[n]);
        *reinterpret_cast<uint4*>(static_cast<T*>(x.data) + offset) = bits;
    }
};

// A thread makes one unit of dq and of dk.
template <class T>
__global__ __launch_bounds__(kCombineThreads) void delta_combine_kernel(
    const __grid_constant__ DeltaCombineParams p) {
    TFLA_DEVICE_CODE {
        const DeltaShape& s = p.shape;
        const int units = s.dim_k / kUnit, heads = s.heads / s.group;
        int64_t index = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
        const int column = index % units * kUnit;
        index /= units;
        const int head = index % heads;
        index /= heads;
        const int row = index % s.seq;
        const int64_t batch = index / s.seq;
        if (batch >= s.batch) return;
        auto offset = [&](const Operand& x, int head) {
            return batch * x.batch_stride + head * x.head_stride + row * x.row_stride + column;
        };
        Unit<T> dq, dk;
#pragma unroll 1
        for (int n = 0; n < s.group; n++) {
            const int part = head * s.group + n;
            if (p.of_floats) {
                dq.add_floats(p.dq_parts, offset(p.dq_parts, part));
                dk.add_floats(p.dk_parts, offset(p.dk_parts, part));
            } else {
                dq.add(p.dq_parts, offset(p.dq_parts, part));
                dk.add(p.dk_parts, offset(p.dk_parts, part));
            }
        }
        dq.store(p.dq, offset(p.dq, head));
        dk.store(p.dk, offset(p.dk, head));
    }
}

}  // namespace tfla_tk::delta_rule
