// Fused chunk-recurrent mLSTM forward (exponential and sigmoid input gate).
//
// One CTA owns a (batch, head, slice of V) and walks the sequence in chunks of 64 tokens; the state C stays
// in the registers of the state warpgroups in fp32 and never touches global memory between chunks. Per chunk:
//   producer   TMA of K, Q, V tiles into rings; a second warp scans the gates ahead (gates.cuh)
//   state      publishes C, rounded, for Q C; then C = decay C + (key_scale . K)^T V and n likewise
//   output     S = Q K^T; O = Q C; P = gate(S); O = inter . O + P V; h = O / max(|q n|, floor); TMA store
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md.
#include "mlstm_fwd_globals.cuh"
#include "mlstm_fwd_output.cuh"
#include "mlstm_fwd_producer.cuh"
#include "mlstm_fwd_state.cuh"

#ifndef TFLA_DIM_QK
#error "TFLA_DIM_QK, TFLA_SLICE_V and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTiling.ctas_per_sm) void mlstm_fwd_kernel(
    const __grid_constant__ Globals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

    if (threadIdx.x == 0) {
        smem.init_barriers();
        g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.prefetch();
    }
    __syncthreads();

    if (warpgroup_id == 0) {
        warpgroup::decrease_registers<C::kTiling.registers.producer>();
        const int warp = warpgroup::warpid();
        if (warp == 0 && laneid() == 0) load_tiles(g, smem);
        if (C::kNormalize && warp >= 2) compute_qn(g, smem, warp - 2);
        if (warp == 1 && g.sigmoid_gate) scan_gates<C, true>(g, smem);
        if (warp == 1 && !g.sigmoid_gate) scan_gates<C, false>(g, smem);
    } else if (warpgroup_id <= C::kStateWarpgroups) {
        warpgroup::increase_registers<C::kTiling.registers.state>();
        update_state(g, smem, warpgroup_id - 1);
    } else {
        warpgroup::increase_registers<C::kTiling.registers.output>();
        compute_output(g, smem);
    }
}

template <class T, bool kNormalize> void run_mlstm_fwd(const MlstmFwdParams& p, cudaStream_t stream) {
    using C = Config<T, TFLA_DIM_QK, TFLA_SLICE_V, kNormalize, static_cast<Schedule>(TFLA_SCHEDULE)>;
    const int slices = (p.dim_v + C::kSliceV - 1) / C::kSliceV;
    const Globals g{TensorMap(p.q, p.batch, p.heads, p.seq, p.dim_qk, kChunk, p.half),
                    TensorMap(p.k, p.batch, p.heads, p.seq, p.dim_qk, kChunk, p.half),
                    TensorMap(p.v, p.batch, p.heads, p.seq, p.dim_v, kChunk, p.half),
                    TensorMap(p.h, p.batch, p.heads, p.seq, p.dim_v, 16, p.half),
                    p.i,
                    p.f,
                    p.c_initial,
                    p.n_initial,
                    p.m_initial,
                    p.c_last,
                    p.n_last,
                    p.m_last,
                    p.heads,
                    p.seq,
                    p.dim_qk,
                    p.dim_v,
                    slices,
                    p.scale,
                    p.eps,
                    std::log2(static_cast<double>(p.scale)),
                    p.sigmoid_gate};
    constexpr int kSharedBytes = sizeof(SharedMemoryPlan<C>);
    static_assert(kSharedBytes * C::kTiling.ctas_per_sm <= MAX_SHARED_MEMORY);

    auto check = [](cudaError_t error) {
        if (error != cudaSuccess)
            throw std::runtime_error(std::string("mlstm_fwd: ") + cudaGetErrorString(error));
    };
    check(cudaSetDevice(p.device));
    check(
        cudaFuncSetAttribute(mlstm_fwd_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    mlstm_fwd_kernel<C><<<p.batch * p.heads * slices, C::kThreads, kSharedBytes, stream>>>(g);
    check(cudaGetLastError());
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_fwd(const MlstmFwdParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    if (params.half)
        params.normalize ? mlstm::run_mlstm_fwd<kittens::half, true>(params, s)
                         : mlstm::run_mlstm_fwd<kittens::half, false>(params, s);
    else
        params.normalize ? mlstm::run_mlstm_fwd<kittens::bf16, true>(params, s)
                         : mlstm::run_mlstm_fwd<kittens::bf16, false>(params, s);
}

}  // namespace tfla_tk
