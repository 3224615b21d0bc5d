// One token of mLSTM: the state is read once and written once, which bounds the time.
//
//     1  load the first rows of C, then the token, its gates, n and m
//     2  while C comes: the token's factors, n behind it, q n; k, q and v to shared memory
//     3  stream C: per row C = decay C + k (write v), with q C added up
//     4  q C over the rows of a warp, over the warps in a fixed order, h
//     5  n and m
//
// CTAs: slices of V, heads, batch entries. A CTA has all rows of a slice: its threads form groups of `across`
// lanes side by side in a row, and a thread owns kWidth columns of every group-th row.
//
// In place, the first slice's CTA must not write n and m before the others have read them. So the slices of a
// head form a cluster: all arrive at its barrier when they have read n, and the first waits there before it
// writes. No flag in global memory is needed, so concurrent calls and graph replays cannot interfere.
#pragma once

#include "common/cluster.cuh"
#include "common/kernel.cuh"
#include "decode/mlstm/gates.cuh"
#include "decode/mlstm/numbers.cuh"
#include "decode/numbers.cuh"
#include "decode/sums.cuh"

namespace tfla_tk::decode {

constexpr int kStepThreads = 256, kStepWarps = kStepThreads / 32;
constexpr int kStepLanes = 32;    // side by side at most
constexpr int kStepInFlight = 8;  // rows of a thread
static_assert(kMlstmKeys <= kStepThreads);
// CTAs per multiprocessor, limited by registers: 80 per thread, a few more where the state becomes narrower
template <class Before, class After> constexpr int kStepCtas = sizeof(Before) > sizeof(After) ? 2 : 3;

// Factors of the token, relative to e^m with m as it is stored: then C e^m is exact, whatever m loses by
// rounding.
struct StepFactors {
    float decay, write;  // on the state, and on k v^T
    float floor, eps;    // the normaliser is max(|d|, floor) + eps
    float m;
};

// i, f: the token's pre-activations. m: the stabiliser before it.
__device__ inline StepFactors step_factors(const MlstmParams& p, float i, float f, float m) {
    const auto log_f = static_cast<double>(log2_sigmoid(f));
    if (p.sigmoid_gate)
        return {power_of_two(log_f), power_of_two(static_cast<double>(log2_sigmoid(i))), 1.f, p.eps, 0.f};
    const auto before = static_cast<double>(m) * kLog2eDouble, log_i = static_cast<double>(log2_exp(i));
    const double exact = larger(log_f + before, log_i);
    const float stored = stored_stabiliser(p.after.m_dtype, static_cast<float>(exact * kLogOf2));
    const double unit = static_cast<double>(stored) * kLog2eDouble;
    return {power_of_two(log_f + before - unit), power_of_two(log_i - unit), power_of_two(-unit),
            p.eps * power_of_two(exact - unit), stored};
}

template <int kWidth> struct StepShared {
    static constexpr int kColumns = kStepLanes * kWidth;
    union {
        float2 pairs[kMlstmKeys];          // k and q
        float sums[kStepWarps][kColumns];  // q C over the rows of a warp, when the pairs are no longer read
    };
    float values[kStepThreads];  // write v
    float n[kMlstmKeys];         // behind the token
    float norms[kStepWarps];     // q n over the keys of a warp
    float floor, eps, m;
};

// Before, After: types of C. kWidth: columns of a thread, which move as one word.
template <class Before, class After, int kWidth> struct Step {
    const MlstmParams& p;
    StepShared<kWidth>& shared;
    const int batch, head, index;  // index: of the head in all heads
    const int log2_lanes, groups, columns, first_column, lane, group;
    const int rows;    // of the slice, 0 where the thread's columns are behind V
    const int stride;  // to the thread's next row
    const Before* from;
    Columns<Before, kWidth> words[kStepInFlight]{};
    float decay;

    __device__ inline Step(const MlstmParams& p, StepShared<kWidth>& shared)
        : p(p),
          shared(shared),
          batch(blockIdx.z),
          head(blockIdx.y),
          index(batch * p.heads + head),
          log2_lanes(log2_of(p.tiling.across)),
          groups(kStepThreads >> log2_lanes),
          columns(kWidth << log2_lanes),
          first_column(blockIdx.x * columns),
          lane(threadIdx.x & (p.tiling.across - 1)),
          group(threadIdx.x >> log2_lanes),
          rows(first_column + lane * kWidth < p.dim_v ? p.dim_k : 0),
          stride(groups * p.dim_v),
          from(static_cast<const Before*>(p.before.c) + first_element(threadIdx.x)) {}

    // Of a thread, in C.
    __device__ inline std::int64_t first_element(int thread) const {
        const std::int64_t row = static_cast<std::int64_t>(index) * p.dim_k + (thread >> log2_lanes);
        return row * p.dim_v + first_column + (thread & (p.tiling.across - 1)) * kWidth;
    }

    __device__ inline void run() {
#pragma unroll
        for (int n = 0; n < kStepInFlight; n++) load_row(n, group + n * groups);
        load_token();
        __syncthreads();
        if (p.in_place) arrive_at_cluster();
        float sums[kWidth]{};
        update(sums);
        add_up(sums);
        write_h();
        if (p.in_place) wait_for_cluster();
        if (blockIdx.x != 0) return;
        const int key = threadIdx.x;
        if (key < p.dim_k)
            store_number(p.after.n, p.after.n_dtype, static_cast<std::int64_t>(index) * p.dim_k + key,
                         shared.n[key]);
        if (key == 0 && !p.sigmoid_gate) store_number(p.after.m, p.after.m_dtype, index, shared.m);
    }

    // Where there is no row, what was there before stays.
    __device__ inline void load_row(int n, int row) {
        if (row < rows) words[n].load(from);
        advance(from, stride);
    }

    // All loads are issued before the first is waited for.
    __device__ inline void load_token() {
        const int key = threadIdx.x, warp = threadIdx.x / 32;
        const bool has_key = key < p.dim_k, has_m = !p.sigmoid_gate;
        const int some_key = has_key ? key : 0;
        const int column = min(first_column + key, p.dim_v - 1);
        const MlstmState& state = p.before;
        const Number i = gate_of(p.i, batch, head, 0), f = gate_of(p.f, batch, head, 0);
        const Number m(has_m ? state.m : state.n, has_m ? state.m_dtype : state.n_dtype, has_m ? index : 0);
        const Number n_before(state.n, state.n_dtype, static_cast<std::int64_t>(index) * p.dim_k + some_key);
        const Number k_stored = number_of(p.k, some_key), q_stored = number_of(p.q, some_key);
        const Number v_stored = number_of(p.v, column);

        const StepFactors factors = step_factors(p, i, f, m);
        decay = factors.decay;
        shared.values[key] = factors.write * v_stored;
        const float k = has_key ? k_stored : 0.f, q = has_key ? q_stored : 0.f;
        float n = n_before;
        shared.pairs[key] = {k, q};
        if (p.normalize) n = factors.decay * n + factors.write * k;
        const float norm = sum_of_warp(q * n);
        if (key % 32 == 0) shared.norms[warp] = norm;
        shared.n[key] = n;
        if (key == 0) shared.floor = factors.floor, shared.eps = factors.eps, shared.m = factors.m;
    }

    __device__ inline Number number_of(const MlstmRows& x, int column) const {
        return {x.data, p.dtype, batch * x.batch_stride + head * x.head_stride + column * x.column_stride};
    }

    // Writes C behind the token, and adds q C to the sums.
    __device__ inline void update(float (&sums)[kWidth]) {
        // NOTES: made only here, from the thread reread: above, registers hold the loads in flight and the
        // token
        After* to = static_cast<After*>(p.after.c) + first_element(fresh_thread());
        float values[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; e++) values[e] = shared.values[lane * kWidth + e];
        for (int base = 0; base < p.dim_k; base += kStepInFlight * groups) {
#pragma unroll
            for (int n = 0; n < kStepInFlight; n++) {
                const int row = base + n * groups + group;
                const Columns<Before, kWidth> old = words[n];
                load_row(n, row + kStepInFlight * groups);
                float2 pair = shared.pairs[row & (kMlstmKeys - 1)];
                if (row >= rows) pair.y = 0.f;
                Columns<After, kWidth> next;
#pragma unroll
                for (int e = 0; e < kWidth; e++) {
                    const float x = fmaf(pair.x, values[e], decay * old[e]);
                    sums[e] = fmaf(pair.y, x, sums[e]);
                    next.set(e, x);
                }
                if (row < rows) next.store(to);
                advance(to, stride);
            }
        }
    }

    // Leaves the sums over the rows of a warp in shared memory.
    __device__ inline void add_up(float (&sums)[kWidth]) {
        const int warp = threadIdx.x / 32, of_warp = threadIdx.x % 32;
#pragma unroll
        for (int e = 0; e < kWidth; e++)
            for (int step = p.tiling.across; step < 32; step *= 2)
                sums[e] += __shfl_xor_sync(kAllLanes, sums[e], step);
        __syncthreads();
        if (of_warp < p.tiling.across) {
#pragma unroll
            for (int e = 0; e < kWidth; e++) shared.sums[warp][lane * kWidth + e] = sums[e];
        }
        __syncthreads();
    }

    __device__ inline void write_h() const {
        const int place = threadIdx.x, column = first_column + place;
        if (place >= columns || column >= p.dim_v) return;
        float h = 0.f, d = 0.f;
#pragma unroll
        for (int warp = 0; warp < kStepWarps; warp++) h += shared.sums[warp][place], d += shared.norms[warp];
        h *= p.scale;
        if (p.normalize) h /= normaliser(p.scale * d, shared.floor, shared.eps);
        store_number(p.h, p.dtype, static_cast<std::int64_t>(index) * p.dim_v + column, h);
    }
};

template <class Before, class After, int kWidth>
__global__ __launch_bounds__(kStepThreads, kStepCtas<Before, After>) void mlstm_step_kernel(
    const __grid_constant__ MlstmParams p) {
    TFLA_DEVICE_CODE {
        __shared__ StepShared<kWidth> shared;
        Step<Before, After, kWidth>(p, shared).run();
    }
}

}  // namespace tfla_tk::decode
