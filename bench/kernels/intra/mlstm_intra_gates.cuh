// Gate scan of the intra-chunk mLSTM kernel: one CTA walks a whole head and leaves four floats per token.
#pragma once

#include <limits>

#include "common/warp.cuh"
#include "mlstm_intra_config.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::intra {

constexpr int kScanThreads = 256, kScanWarps = kScanThreads / 32;
constexpr int kScanTokens = 4;  // of a thread per step

template <class C> __global__ __launch_bounds__(kScanThreads) void mlstm_intra_gates(const Globals g) {
    __shared__ double warp_sums[kScanWarps];
    __shared__ float warp_maxima[kScanWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t head_index = blockIdx.x;
    const int batch = blockIdx.x / g.heads, head = blockIdx.x % g.heads;
    const GateRows input(g.i, batch, head, 0), forget(g.f, batch, head, 0);

    double b_before = 0.;    // of all earlier steps
    float row_before = 0.f;  // M, with m_in = 0
    for (int first = 0; first < g.padded(); first += kScanThreads * kScanTokens) {
        const int t0 = first + kScanTokens * threadIdx.x;
        double b[kScanTokens], sum = 0.;
#pragma unroll
        for (int x = 0; x < kScanTokens; x++) {
            if (t0 + x < g.seq) sum += static_cast<double>(log2_sigmoid(forget[t0 + x]));
            b[x] = sum;
        }
        const double warp_sum = warp_inclusive_sum(sum, lane);
        if (lane == 31) warp_sums[warp] = warp_sum;
        __syncthreads();
        double b_start = b_before + (warp_sum - sum);
        for (int w = 0; w < kScanWarps; w++) {
            if (w < warp) b_start += warp_sums[w];
            b_before += warp_sums[w];
        }

        float2 column[kScanTokens];
        float row[kScanTokens], largest = -std::numeric_limits<float>::infinity();
#pragma unroll
        for (int x = 0; x < kScanTokens; x++) {
            b[x] += b_start;
            const bool exists = t0 + x < g.seq;
            const double a = exists ? static_cast<double>(log2_exp(input[t0 + x])) - b[x] : -1e30;
            const double scaled = a + g.log2_scale;
            column[x].x = static_cast<float>(scaled);
            column[x].y = static_cast<float>(scaled - static_cast<double>(column[x].x));
            row[x] = largest = fmaxf(largest, __double2float_ru(a));
        }
        const float warp_max = warp_inclusive_max(largest);
        if (lane == 31) warp_maxima[warp] = warp_max;
        float before = __shfl_up_sync(0xffffffff, warp_max, 1);
        before = lane == 0 ? row_before : fmaxf(row_before, before);
        __syncthreads();
        for (int w = 0; w < kScanWarps; w++) {
            if (w < warp) before = fmaxf(before, warp_maxima[w]);
            row_before = fmaxf(row_before, warp_maxima[w]);
        }

        if (t0 >= g.padded()) continue;
        float floor[kScanTokens];
#pragma unroll
        for (int x = 0; x < kScanTokens; x++) {
            row[x] = fmaxf(row[x], before);
            floor[x] = exp2f(static_cast<float>(-(b[x] + static_cast<double>(row[x]))));
        }
        auto* columns = reinterpret_cast<float4*>(&g.columns(head_index)[t0]);
        columns[0] = {column[0].x, column[0].y, column[1].x, column[1].y};
        columns[1] = {column[2].x, column[2].y, column[3].x, column[3].y};
        *reinterpret_cast<float4*>(&g.references(head_index)[t0]) = {row[0], row[1], row[2], row[3]};
        *reinterpret_cast<float4*>(&g.floors(head_index)[t0]) = {floor[0], floor[1], floor[2], floor[3]};
    }
}

}  // namespace tfla_tk::intra
