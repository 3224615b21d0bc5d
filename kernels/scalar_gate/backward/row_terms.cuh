// e_t and log2 w_t of every row, for the walks of the backward and their segment sums, from d_t and m_t of
// the forward and from dh_t.h_t.
//
// mlstm_bwd_rows computes dh_t.h_t from dh and h and is bound by memory: both are read once. A group of lanes
// takes a row, 16 bytes per lane and load; eight loads of a lane are in flight. mlstm_bwd_factors adds up
// dh_t.h_t from the walk for dv, which leaves it per slice. In both, y of the grid is the share of V.
#pragma once

#include "common/kernel.cuh"
#include "common/tiles.cuh"
#include "scalar_gate/bindings/params_backward.h"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::mlstm {

constexpr int kRowsThreads = 256;
constexpr float kLog2e = 1.44269504f;

// d and the normaliser's floor of the row `at`.
struct RowNorm {
    float d, log2_floor, floor;

    __device__ inline RowNorm(const RowNorms& rows, int64_t at)
        : d(rows.row_n[at]),
          log2_floor(rows.row_m ? -kLog2e * rows.row_m[at] : 0.f),
          floor(exp2f(log2_floor)) {}

    // NOTES: e^{-m} may be inf; log2 w must stay finite, so that no weight is exp2(inf - inf).
    __device__ inline float log2_w(float eps) const {
        return isinf(floor) && !isnan(d) ? log2_floor : log2f(row_normaliser(d, floor, eps));
    }
    __device__ inline float e(float dh_h) const { return fabsf(d) > floor ? (d > 0.f ? -dh_h : dh_h) : 0.f; }
};

// Stores e, and log2 w where wanted, of the row `at` for a share of V. dh_h: dh_t.h_t over the share's
// columns.
__device__ inline void store_row_factors(const RowFactorPointers& rows, int64_t at, const RowNorm& norm,
                                         int part, float dh_h) {
    if (part == 0 && rows.log2_w) rows.log2_w[at] = norm.log2_w(rows.norms.eps);
    rows.e[part * rows.e_stride + at] = norm.e(dh_h);
}

// kLanes lanes share a row of at most 8 * kLanes elements.
template <class Pair, int kLanes>
__global__ __launch_bounds__(kRowsThreads) void mlstm_bwd_rows_kernel(
    const __grid_constant__ MlstmBwdRowsParams g) {
    TFLA_DEVICE_CODE {
        constexpr int kRows = 4;              // per group of lanes
        constexpr int kGroups = 32 / kLanes;  // per warp
        constexpr int kTokens = kGroups * kRows * kRowsThreads / 32;
        const int tiles = (g.seq + kTokens - 1) / kTokens;
        // neighbouring CTAs read neighbouring memory
        const bool heads_inside = g.dh.head_stride < g.dh.row_stride;
        const int block = blockIdx.x, outer = heads_inside ? block / g.heads : block / tiles;
        const int head = heads_inside ? block % g.heads : outer % g.heads;
        const int tile = heads_inside ? outer % tiles : block % tiles;
        const int64_t batch = outer / (heads_inside ? tiles : g.heads);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
        // rows of this group: first, first + kGroups, ..
        const int first = tile * kTokens + warp * kGroups * kRows + group;
        const int part = blockIdx.y, column = part * g.part_columns + 8 * lane;
        const bool in_part = 8 * lane < g.part_columns && column < g.dim_v;

        uint4 x[kRows], y[kRows];
        auto load = [&](uint4(&out)[kRows], const Operand& from) {
            const char* columns = static_cast<const char*>(from.data) +
                                  2 * (batch * from.batch_stride + head * from.head_stride + column);
#pragma unroll
            for (int row = 0; row < kRows; row++) {
                const int64_t t = first + row * kGroups;
                out[row] = t < g.seq && in_part
                               ? __ldcs(reinterpret_cast<const uint4*>(columns + 2 * t * from.row_stride))
                               : uint4{};
            }
        };
        // the row that this lane writes
        const int t = first + lane * kGroups;
        const bool writes = lane < kRows && t < g.seq;
        const int64_t at = (batch * g.heads + head) * g.seq + t;
        load(x, g.dh), load(y, g.h);

        float dh_h = 0.f;  // of the row that this lane writes
#pragma unroll
        for (int row = 0; row < kRows; row++) {
            float sum = dot<Pair>(x[row], y[row]);
#pragma unroll
            for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
            if (lane == row) dh_h = sum;
        }
        if (writes) store_row_factors(g.rows, at, RowNorm(g.rows.norms, at), part, dh_h);
    }
}

// One thread per row.
__global__ __launch_bounds__(kRowsThreads) void mlstm_bwd_factors_kernel(
    const __grid_constant__ MlstmBwdFactorsParams g) {
    TFLA_DEVICE_CODE {
        const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowsThreads + threadIdx.x;
        if (at >= g.count) return;
        constexpr int kTogether = 2;  // slices loaded at a time
        const int part = blockIdx.y, end = min((part + 1) * g.part_slices, g.slices);
        const RowNorm norm(g.rows.norms, at);
        float dh_h = 0.f;
        for (int first = part * g.part_slices; first < end; first += kTogether) {
            float x[kTogether];
#pragma unroll
            for (int n = 0; n < kTogether; n++)
                x[n] = first + n < end ? g.dots[(first + n) * g.slice_stride + at] : 0.f;
#pragma unroll
            for (float of_slice : x) dh_h += of_slice;
        }
        store_row_factors(g.rows, at, norm, part, dh_h);
    }
}

}  // namespace tfla_tk::mlstm
