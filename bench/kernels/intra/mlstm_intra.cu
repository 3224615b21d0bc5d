// The intra-chunk part of mLSTM alone, one chunk of all S tokens: an instrument to compare schedules at long
// chunks.
//
// A first kernel scans the gates of every head. Then one CTA owns 128 query rows of a (batch, head, slice of
// V) and walks the KV tiles of 64 tokens from the first to the diagonal:
//   producer   TMA of Q, then K tiles into one ring and V tiles with their gates into another
//   consumers  two warpgroups of 64 rows: S = Q K^T; P = gate(S); O += P V; h = O / max(|sum P|, floor); TMA
//   store
// No rescaling: the row's reference M_t needs the gates alone. Schedules: mlstm_intra_config.cuh.
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md with m_in = 0, C_in = 0, n_in = 0.
#include <cmath>

#include "common/launch.cuh"
#include "mlstm_intra_config.cuh"
#include "mlstm_intra_consumer.cuh"
#include "mlstm_intra_gates.cuh"

#ifndef TFLA_DIM_QK
#error "TFLA_DIM_QK, TFLA_SLICE_V and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::intra {

template <class C> __device__ inline void load_queries_and_keys(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task task = Task::of_block<C>(g);
    tma::expect_bytes(smem.q_arrived, sizeof(smem.q));
    for (int consumer = 0; consumer < kConsumers; consumer++)
        load_tile(smem.q[consumer], g.q, smem.q_arrived, 0, (kConsumers * task.query_tile + consumer) * kTile,
                  task.head, task.batch);
#pragma unroll 1
    for (int tile = 0; tile < task.tiles(); tile++) {
        const auto [slot, phase] = C::key(tile);
        wait_free(smem.k_free[slot], phase);
        tma::expect_bytes(smem.k_arrived[slot], sizeof(smem.k[slot]));
        load_tile(smem.k[slot], g.k, smem.k_arrived[slot], 0, tile * kTile, task.head, task.batch);
    }
}

template <class C> __device__ inline void load_values_and_gates(const Globals& g, SharedMemoryPlan<C>& smem) {
    const Task task = Task::of_block<C>(g);
#pragma unroll 1
    for (int tile = 0; tile < task.tiles(); tile++) {
        const auto [slot, phase] = C::value(tile);
        wait_free(smem.v_free[slot], phase);
        tma::expect_bytes(smem.gates_arrived[slot], sizeof(smem.columns[slot]));
        load_bytes(smem.columns[slot], &g.columns(task.head_index)[tile * kTile], sizeof(smem.columns[slot]),
                   smem.gates_arrived[slot]);
        tma::expect_bytes(smem.v_arrived[slot], sizeof(smem.v[slot]));
        load_tile(smem.v[slot], g.v, smem.v_arrived[slot], task.column, tile * kTile, task.head, task.batch);
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void mlstm_intra_kernel(const __grid_constant__ Globals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

    if (threadIdx.x == 0) {
        smem.init_barriers();
        g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.prefetch();
    }
    __syncthreads();

    if (warpgroup_id == 0) {
        warpgroup::decrease_registers<C::kRegistersProducer>();
        const int warp = warpgroup::warpid();
        if (warp == 0 && laneid() == 0) load_queries_and_keys(g, smem);
        if (warp == 1 && laneid() == 0) load_values_and_gates(g, smem);
    } else {
        warpgroup::increase_registers<C::kRegistersConsumer>();
        if (warpgroup_id == 1)
            consume<C, 0>(g, smem);
        else
            consume<C, 1>(g, smem);
    }
}

void run_mlstm_intra(const MlstmIntraParams& p, cudaStream_t stream) {
    using C = Config<bf16, TFLA_DIM_QK, TFLA_SLICE_V, static_cast<Schedule>(TFLA_SCHEDULE)>;
    const DeviceGuard guard(p.device, "mlstm_intra");
    const int slices = (p.dim_v + C::kSliceV - 1) / C::kSliceV;
    const int query_tiles = (p.seq + kPadding - 1) / kPadding;
    const Globals g{TensorMap(p.q, p.batch, p.heads, p.seq, p.dim_qk, kTile, false),
                    TensorMap(p.k, p.batch, p.heads, p.seq, p.dim_qk, kTile, false),
                    TensorMap(p.v, p.batch, p.heads, p.seq, p.dim_v, kTile, false),
                    TensorMap(p.h, p.batch, p.heads, p.seq, p.dim_v, 16, false),
                    p.i,
                    p.f,
                    p.workspace,
                    p.heads,
                    p.seq,
                    query_tiles,
                    p.eps,
                    std::log2(static_cast<double>(p.scale)),
                    0};
    const int heads = p.batch * p.heads;
    launch<mlstm_intra_gates<C>>(g, heads, kScanThreads, p.device, stream, "mlstm_intra_gates");
    launch<mlstm_intra_kernel<C>, sizeof(SharedMemoryPlan<C>)>(g, dim3(slices, query_tiles, heads),
                                                               C::kThreads, p.device, stream, "mlstm_intra");
}

}  // namespace tfla_tk::intra

namespace tfla_tk {

void mlstm_intra(const MlstmIntraParams& params, void* stream) {
    intra::run_mlstm_intra(params, static_cast<cudaStream_t>(stream));
}

}  // namespace tfla_tk
