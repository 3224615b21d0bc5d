// Before the passes of the mLSTM backward: log2 w_t and e_t of every row, from dh, h and the forward's rows.
//
// Bound by memory: dh and h are read once. A group of lanes takes a row, 16 bytes a lane and load; eight
// loads of a lane are in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tfla_tk/params_bwd.h"

namespace tfla_tk::mlstm {

constexpr int kRowsThreads = 256;
constexpr float kLog2e = 1.44269504f;

__device__ inline float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline float2 to_float2(__half2 x) { return __half22float2(x); }

// Of eight elements; Pair holds two of them.
template <class Pair> __device__ inline float dot(const uint4& x, const uint4& y) {
    const Pair *a = reinterpret_cast<const Pair*>(&x), *b = reinterpret_cast<const Pair*>(&y);
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 u = to_float2(a[n]), v = to_float2(b[n]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

struct RowFactors {
    float log2_w, e;
};

// dh_h: dh_t.h_t. NOTES: e^{-m} may be inf; log2 w stays finite, so that no weight becomes inf - inf.
__device__ inline RowFactors row_factors(float dh_h, float d, float log2_floor, float eps) {
    const float floor = exp2f(log2_floor), size = fabsf(d);
    const float w = (size <= floor ? floor : size) + eps;  // NaN of d stays
    return {isinf(floor) ? log2_floor : log2f(w), size > floor ? (d > 0.f ? -dh_h : dh_h) : 0.f};
}

// kLanes lanes share a row of at most 8 * kLanes * kVectors elements.
template <class Pair, int kLanes, int kVectors>
__global__ __launch_bounds__(kRowsThreads) void mlstm_bwd_rows_kernel(
    const __grid_constant__ MlstmBwdRowsParams g) {
    constexpr int kRows = 4 / kVectors;   // of a group
    constexpr int kGroups = 32 / kLanes;  // of a warp
    constexpr int kTokens = kGroups * kRows * kRowsThreads / 32;
    const int tiles = (g.seq + kTokens - 1) / kTokens;
    // neighbours of the grid are neighbours in memory
    const bool heads_inside = g.dh.head_stride < g.dh.row_stride;
    const int block = blockIdx.x, outer = heads_inside ? block / g.heads : block / tiles;
    const int head = heads_inside ? block % g.heads : outer % g.heads;
    const int tile = heads_inside ? outer % tiles : block % tiles;
    const int64_t batch = outer / (heads_inside ? tiles : g.heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
    // of this group: rows first, first + kGroups, ..
    const int first = tile * kTokens + warp * kGroups * kRows + group;
    const int vectors = g.dim_v / 8;

    uint4 x[kRows][kVectors], y[kRows][kVectors];
    auto load = [&](uint4(&out)[kRows][kVectors], const Operand& from) {
        const char* rows =
            static_cast<const char*>(from.data) + 2 * (batch * from.batch_stride + head * from.head_stride);
#pragma unroll
        for (int row = 0; row < kRows; row++)
#pragma unroll
            for (int n = 0; n < kVectors; n++) {
                const int64_t t = first + row * kGroups;
                const int vector = lane + n * kLanes;
                out[row][n] =
                    t < g.seq && vector < vectors
                        ? __ldcs(reinterpret_cast<const uint4*>(rows + 2 * t * from.row_stride) + vector)
                        : uint4{};
            }
    };
    // the row that this lane writes
    const int t = first + lane * kGroups;
    const bool writes = lane < kRows && t < g.seq;
    const int64_t at = (batch * g.heads + head) * g.seq + t;
    if (g.row_n == nullptr) {
        if (writes) g.log2_w[at] = g.e[at] = 0.f;
        return;
    }
    load(x, g.dh), load(y, g.h);
    const float d = writes ? g.row_n[at] : 0.f;
    const float log2_floor = writes && g.row_m ? -kLog2e * g.row_m[at] : 0.f;

    float dh_h = 0.f;  // of the row that this lane writes
#pragma unroll
    for (int row = 0; row < kRows; row++) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kVectors; n++) sum += dot<Pair>(x[row][n], y[row][n]);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        if (lane == row) dh_h = sum;
    }
    if (!writes) return;
    const RowFactors found = row_factors(dh_h, d, log2_floor, g.eps);
    g.log2_w[at] = found.log2_w, g.e[at] = found.e;
}

}  // namespace tfla_tk::mlstm
