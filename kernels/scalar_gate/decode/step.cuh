// One token of mLSTM: C' = decay C + write k v^T, n likewise, h = s q C' / normaliser. The kernel is bound by
// reading the state once and writing it once.
//
// A CTA has all rows of a slice of V of one head. Its threads form `groups` rows of `lanes`; a thread owns
// `width` columns (up to 16 bytes) of every groups-th row of C and keeps kStepInFlight of them in flight.
// Only q, k, n and the gates are read more than once, by every slice of a head.
//
// In place, the first slice's CTA must not write n and m before the others have read them. So the slices of a
// head form a cluster: all arrive at its barrier when they have read n, and the first waits there before it
// writes. No flag in global memory is needed, so concurrent calls and graph replays cannot interfere.
#pragma once

#include "common/kernel.cuh"
#include "scalar_gate/bindings/params_step.h"
#include "scalar_gate/decode/decode.cuh"
#include "scalar_gate/gate/gates.cuh"

namespace tfla_tk::mlstm {

constexpr int kStepThreads = 256;
constexpr int kStepWarps = kStepThreads / 32;
constexpr int kStepInFlight = 8;  // loads per thread
static_assert(kDecodeMaxKeys <= kStepThreads);
// CTAs per multiprocessor, limited by registers: 80 per thread, a few more where the state becomes narrower
template <class Before, class After> constexpr int kStepCtas = sizeof(Before) > sizeof(After) ? 2 : 3;

// Factors of the token, relative to e^m with m as rounded for storage: decay and write make up for the
// rounding of m, so that C e^m is exact.
struct StepFactors {
    float decay, write;
    float floor, eps;  // the normaliser is max(|d|, floor) + eps
    float m;
};

__device__ inline StepFactors step_factors(const MlstmStepParams& g, float i, float f, float m) {
    const auto log_f = static_cast<double>(log2_sigmoid(f));
    if (g.sigmoid_gate)
        return {exp2_of(log_f), exp2_of(static_cast<double>(log2_sigmoid(i))), 1.f, g.eps, 0.f};
    const auto before = static_cast<double>(m) * kLog2eDouble, log_i = static_cast<double>(log2_exp(i));
    const double exact = larger(log_f + before, log_i);
    const float stored = stored_stabiliser(g.after.m_dtype, static_cast<float>(exact * kLn2));
    const double unit = static_cast<double>(stored) * kLog2eDouble;
    return {exp2_of(log_f + before - unit), exp2_of(log_i - unit), exp2_of(-unit),
            g.eps * exp2_of(exact - unit), stored};
}

// Values that registers cannot hold beside the loads in flight.
struct StepShared {
    float2 key_query[kStepThreads];  // k_r, q_r
    float value[kStepThreads];       // write v for the slice's columns
    float n_next[kStepThreads];
    StepFactors gates;
    float sums[kStepWarps][32 * 8];  // q C' over the rows of a warp
    float norms[kStepWarps];         // q n' over the rows of a warp
};

// kWidth: tiling.width, columns of C per thread.
template <class Before, class After, int kWidth>
__global__ __launch_bounds__(kStepThreads, kStepCtas<Before, After>) void mlstm_step_kernel(
    const __grid_constant__ MlstmStepParams g) {
    TFLA_DEVICE_CODE {
        __shared__ StepShared shared;
        const int lanes = g.tiling.lanes, log2_lanes = __ffs(lanes) - 1, groups = kStepThreads >> log2_lanes;
        const int columns = kWidth << log2_lanes;
        const int slice = blockIdx.x, index = blockIdx.z * g.heads + blockIdx.y;  // of the head in all heads
        const int64_t batch = blockIdx.z, head = blockIdx.y;
        const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> log2_lanes,
                  warp = threadIdx.x / 32;
        const int column = slice * columns + lane * kWidth;
        const bool inside = column < g.dim_v;
        auto first_of = [&](int thread) {  // of a thread's elements
            const int64_t row = static_cast<int64_t>(index) * g.dim_qk + (thread >> log2_lanes);
            return row * g.dim_v + slice * columns + (thread & (lanes - 1)) * kWidth;
        };
        const Before* from = static_cast<const Before*>(g.before.c) + first_of(threadIdx.x);
        const int64_t stride = static_cast<int64_t>(groups) * g.dim_v;  // to its next row

        Columns<Before, kWidth> own[kStepInFlight]{};
        auto load = [&](int n, int row) {
            if (inside && row < g.dim_qk) own[n].load(from);
            advance(from, stride);
        };
#pragma unroll
        for (int n = 0; n < kStepInFlight; n++) load(n, group + n * groups);

        // while they are in flight: the gates, n, and what all rows use
        const auto number_of = [&](const TokenRow& x, int n) {
            return Number(x.data, x.dtype, batch * x.batch_stride + head * x.head_stride + n * x.row_stride);
        };
        const int key = threadIdx.x, some_key = key < g.dim_qk ? key : 0;
        const int some_column = slice * columns + key < g.dim_v ? slice * columns + key : 0;
        const StoredState& state = g.before;
        const bool has_m = !g.sigmoid_gate;
        const Number i = number_of(g.i, 0), f = number_of(g.f, 0);
        const Number m(has_m ? state.m : state.n, has_m ? state.m_dtype : state.n_dtype, has_m ? index : 0);
        const Number n_stored(state.n, state.n_dtype, static_cast<int64_t>(index) * g.dim_qk + some_key);
        const Number k_stored = number_of(g.k, some_key), q_stored = number_of(g.q, some_key);
        const Number v_stored = number_of(g.v, some_column);
        const StepFactors gates = step_factors(g, i, f, m);
        const float k = k_stored, q = q_stored;
        float n_next = n_stored;
        shared.value[key] = gates.write * v_stored;
        if (g.normalize) n_next = gates.decay * n_next + gates.write * k;
        shared.key_query[key] = {k, q};
        shared.n_next[key] = n_next;
        const float norm = warp_sum(key < g.dim_qk ? q * n_next : 0.f);
        if (threadIdx.x % 32 == 0) shared.norms[warp] = norm;
        if (threadIdx.x == 0) shared.gates = gates;
        __syncthreads();
        if (g.in_place) arrive_at_cluster();

        // NOTES: made only here, from the thread reread: above, registers hold the loads in flight and the
        // token
        After* to = static_cast<After*>(g.after.c) + first_of(fresh_thread());
        const float decay = gates.decay;
        float value[kWidth];
#pragma unroll
        for (int n = 0; n < kWidth; n++) value[n] = shared.value[lane * kWidth + n];
        float sum[kWidth]{};
        for (int base = group; base < g.dim_qk; base += kStepInFlight * groups) {
#pragma unroll
            for (int n = 0; n < kStepInFlight; n++) {
                const int row = base + n * groups;
                const Columns<Before, kWidth> old = own[n];
                load(n, row + kStepInFlight * groups);
                const float2 factors = shared.key_query[static_cast<unsigned>(row) % kStepThreads];
                const bool exists = inside && row < g.dim_qk;
                Columns<After, kWidth> next;
#pragma unroll
                for (int at = 0; at < kWidth; at++) {
                    const float x = decay * old[at] + factors.x * value[at];
                    if (exists) sum[at] += factors.y * x;
                    next.set(at, x);
                }
                if (exists) next.store(to);
                advance(to, stride);
            }
        }

        // over the rows of a warp, then over the warps, in a fixed order
#pragma unroll
        for (int n = 0; n < kWidth; n++)
            for (int step = lanes; step < 32; step *= 2) sum[n] += __shfl_xor_sync(0xffffffff, sum[n], step);
        if (threadIdx.x % 32 < lanes) {
#pragma unroll
            for (int n = 0; n < kWidth; n++) shared.sums[warp][lane * kWidth + n] = sum[n];
        }
        __syncthreads();
        const int out = slice * columns + threadIdx.x;
        if (threadIdx.x < columns && out < g.dim_v) {
            float h = 0.f, d = 0.f;
#pragma unroll
            for (int n = 0; n < kStepWarps; n++) h += shared.sums[n][threadIdx.x], d += shared.norms[n];
            h *= g.scale;
            if (g.normalize) h /= row_normaliser(g.scale * d, shared.gates.floor, shared.gates.eps);
            store_number(g.h, g.h_dtype, static_cast<int64_t>(index) * g.dim_v + out, h);
        }
        if (g.in_place) wait_for_cluster();
        if (slice != 0) return;
        if (key < g.dim_qk)
            store_number(g.after.n, g.after.n_dtype, static_cast<int64_t>(index) * g.dim_qk + key,
                         shared.n_next[key]);
        if (key == 0 && !g.sigmoid_gate) store_number(g.after.m, g.after.m_dtype, index, shared.gates.m);
    }
}

}  // namespace tfla_tk::mlstm
