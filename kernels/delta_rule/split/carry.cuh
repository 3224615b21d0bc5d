// Carries the states of a split over the borders between its segments, in fp32 (bindings/params.h):
//   X[n] <- L[n]^T X[n -+ 1] + X[n]      L: M transposed, or M backward in time
//
// A CTA has a (sequence, head, 8 columns of V), which nobody else reads. Each of its warps sums over 16 rows
// of L, a lane of it for four rows of X; then all add up the sums of the warps in a fixed order. L of the
// next border is on its way meanwhile.
#pragma once

#include "common/kernel.cuh"
#include "delta_rule/walk.cuh"
#include "sequence/carry.cuh"

namespace tfla_tk::delta_rule {

struct CarryGlobals {
    Cut cut;
    float* carried;
    const int* leads;
    const float* maps;
    int heads, seq, dim_k, dim_v;
    bool backward;
};

constexpr int kCarryWarps = 8, kCarryColumns = 8, kCarryDim = 128;

// 8 columns of a state. A unit is four columns of a row: unit (half, row % 4, row / 4). NOTES: so that lanes
// of neighbouring rows find theirs in different banks.
struct CarryTile {
    float4 units[2][4][kCarryDim / 4];
};

__device__ inline void add_scaled(float4& sum, float by, const float4& x) {
    sum.x += by * x.x, sum.y += by * x.y, sum.z += by * x.z, sum.w += by * x.w;
}

// NOTES: two CTAs of a multiprocessor, since one waits for its barriers
__global__ __launch_bounds__(32 * kCarryWarps,
                             2) void delta_carry_kernel(const __grid_constant__ CarryGlobals g) {
    TFLA_DEVICE_CODE {
        __shared__ CarryTile entering, sums[kCarryWarps];
        const int slices = g.dim_v / kCarryColumns, slice = blockIdx.x % slices;
        const int head = blockIdx.x / slices % g.heads;
        const CarriedSequence own = find_carried(g.cut, g.seq, blockIdx.x / slices / g.heads);
        if (own.boundaries == 0) return;
        const int first_segment = own.first_slot + own.sequence;
        if (g.leads[(first_segment + !g.backward) * g.heads + head] != kCarried) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

        // the unit that this thread adds up: of row `row`, and of 4 columns of the CTA's 8
        const int half = warp / 4, row = 4 * lane + warp % 4;
        const bool inside = row < g.dim_k;
        const int64_t state_size = static_cast<int64_t>(g.dim_k) * g.dim_v;
        const int64_t place = static_cast<int64_t>(row) * g.dim_v + slice * kCarryColumns + 4 * half;
        auto state_at = [&](float* states, int slot) {
            return reinterpret_cast<float4*>(
                states + (static_cast<int64_t>(slot) * g.heads + head) * state_size + place);
        };

        // L of a boundary, from this lane's four columns of the warp's first row on
        const bool reads = 16 * warp < g.dim_k && 4 * lane < g.dim_k;
        auto map_at = [&](int n) {
            const int64_t slot = own.first_slot + n + g.backward;
            return g.maps + ((slot * g.heads + head) * g.dim_k + 16 * warp) * g.dim_k + 4 * lane;
        };
        const int step = g.backward ? -1 : 1, count = own.boundaries;
        int n = g.backward ? count - 1 : 0;
        const float4 zeros{0.f, 0.f, 0.f, 0.f};
        float4 map[16];  // of the warp's rows
        const float* rows = map_at(n + step);
#pragma unroll
        for (int y = 0; y < 16; y++)
            map[y] = reads && count > 1 ? *reinterpret_cast<const float4*>(rows + y * g.dim_k) : zeros;
        entering.units[half][warp % 4][lane] = inside ? *state_at(g.carried, own.first_slot + n) : zeros;
        __syncthreads();
#pragma unroll 1
        for (int left = count - 1; left > 0; left--) {
            n += step;
            float4* const at = state_at(g.carried, own.first_slot + n);
            float4 x = inside ? *at : zeros;
            rows = map_at(n + step);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                float4 sum[4] = {zeros, zeros, zeros, zeros};
#pragma unroll
                for (int y = 0; y < 16; y++) {
                    const float4 z = entering.units[part][y % 4][4 * warp + y / 4];
                    add_scaled(sum[0], map[y].x, z), add_scaled(sum[1], map[y].y, z);
                    add_scaled(sum[2], map[y].z, z), add_scaled(sum[3], map[y].w, z);
                    if (part == 1 && left > 1 && reads)
                        map[y] = *reinterpret_cast<const float4*>(rows + y * g.dim_k);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) sums[warp].units[part][i][lane] = sum[i];
            }
            __syncthreads();
#pragma unroll
            for (int other = 0; other < kCarryWarps; other++)
                add_scaled(x, 1.f, sums[other].units[half][warp % 4][lane]);
            if (inside) *at = x;
            entering.units[half][warp % 4][lane] = x;
            __syncthreads();
        }
    }
}

}  // namespace tfla_tk::delta_rule
