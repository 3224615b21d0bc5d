// Fused chunkwise forward of mLSTM (exponential and sigmoid input gate) and of the scalar-decay family.
//
// One CTA owns a (segment of a sequence, head, slice of V) and walks it in chunks of 64 tokens. The state C
// stays in the registers of the state warpgroups in fp32 and is not written to global memory between chunks.
// At K = 256 the kernel is that of transposed/kernel.cuh. Here, up to K = 128, per chunk:
//   producer   loads K, Q, V tiles into rings; a second warp scans the gates ahead (gate/gates.cuh); a third
//   writes n
//              below C^T and carries it on with the sums of the scaled keys
//   state      writes C^T, rounded, to shared memory for Q C; then C = decay C + (key_scale . K)^T V
//   output     S = Q K^T; O, q n = Q [C, n]; P = gate(S); O = inter . O + P V; h = O / max(|q n|, floor); TMA
//              store
// Where sequences are cut, two kernels before it compute the state that arrives at every segment:
//   mlstm_states    sums what each segment adds to the state (segment_sums.cuh)
//   mlstm_combine   carries the states from segment to segment (carry.cuh)
// Equations: "Chunkwise form" of mLSTM in docs/mlstm.md.
#include <cmath>
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/forward/carry.cuh"
#include "scalar_gate/forward/globals.cuh"
#include "scalar_gate/forward/narrow/normaliser.cuh"
#include "scalar_gate/forward/narrow/output.cuh"
#include "scalar_gate/forward/narrow/producer.cuh"
#include "scalar_gate/forward/narrow/state.cuh"
#include "scalar_gate/forward/segment_sums.cuh"
#include "scalar_gate/forward/transposed/kernel.cuh"

#ifndef TFLA_DIM_QK
#error "TFLA_DIM_QK and TFLA_SLICE_V choose the instance"
#endif

namespace tfla_tk::mlstm {

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTiling.ctas_per_sm) void mlstm_fwd_kernel(
    const __grid_constant__ Globals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);

    if (!begin_task<C>(g, smem, blockIdx.x,
                       [&] { g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.h.prefetch(); }))
        return;

    if (warpgroup_id == 0) {
        warpgroup::decrease_registers<C::kTiling.registers.producer>();
        const int warp = warpgroup::warpid();
        if (warp == 0)
            load_tiles(g, smem);
        else if (warp == 1)
            with_gate(g.sigmoid_gate, [&]<class P>(P) { scan_gates<C, P>(g, smem); });
        else if (C::kNormalize && warp == 2)
            carry_norm(g, smem);
    } else if (warpgroup_id <= C::kStateWarpgroups) {
        warpgroup::increase_registers<C::kTiling.registers.state>();
        update_state(g, smem, warpgroup_id - 1);
    } else {
        warpgroup::increase_registers<C::kTiling.registers.output>();
        if (smem.task.tokens > 0) compute_output(g, smem);
    }
}

// Whether the kernel is that of transposed/kernel.cuh.
constexpr bool kTransposed = TFLA_DIM_QK == 256;

FwdWalkGlobals fwd_walk_globals(const MlstmFwdWalk& p) {
    const int64_t slots = static_cast<int64_t>(p.cut.segments - p.cut.sequences) * p.heads;
    auto map = [&](const Operand& x, int heads, int dim) {
        return TensorMap(x, p.batch, heads, p.seq, dim, kChunk, p.half);
    };
    return {map(p.k, p.heads / p.group, p.dim_qk),
            map(p.v, p.heads, p.dim_v),
            p.i,
            p.f,
            p.initial,
            Workspace(p.workspace, slots, p.dim_qk, p.dim_v),
            p.cut,
            p.heads,
            p.seq,
            p.dim_qk,
            p.dim_v,
            (p.dim_v + TFLA_SLICE_V - 1) / TFLA_SLICE_V,
            p.group,
            chunk_slots(p.seq, p.cut.sequences, p.cut.offsets != nullptr),
            p.sigmoid_gate};
}

// CTAs of the kernels that walk segments.
dim3 grid(const FwdWalkGlobals& g, const char* name) {
    return grid_of(static_cast<std::int64_t>(g.cut.segments) * g.heads * g.slices, 1, name);
}

template <class T, bool kNormalize> void run_states(const MlstmFwdWalk& p, cudaStream_t stream) {
    using C = StatesConfig<T, TFLA_DIM_QK, TFLA_SLICE_V, kNormalize>;
    const DeviceGuard guard(p.device, "mlstm_states");
    const FwdWalkGlobals g = fwd_walk_globals(p);
    launch<mlstm_states_kernel<C>, sizeof(StatesMemory<C>)>(g, grid(g, "mlstm_states"), C::kThreads, p.device,
                                                            stream, "mlstm_states");
    const int elements = p.dim_qk * (p.dim_v + 1), per_block = 4 * kCombineThreads;
    launch<mlstm_combine_kernel<kNormalize>>(
        g,
        grid_of(static_cast<std::int64_t>(carrying_ctas(p.cut)) * p.heads,
                (elements + per_block - 1) / per_block, "mlstm_combine"),
        kCombineThreads, p.device, stream, "mlstm_combine");
}

template <class T, bool kNormalize> void run_mlstm_fwd(const MlstmFwdParams& p, cudaStream_t stream) {
    const MlstmFwdWalk& walk = p.walk;
    const DeviceGuard guard(walk.device, "mlstm_fwd");
    auto map = [&](const Operand& x, int heads, int dim, int box_rows) {
        return TensorMap(x, walk.batch, heads, walk.seq, dim, box_rows, walk.half);
    };
    const Globals g{fwd_walk_globals(walk),
                    map(p.q, walk.heads / walk.group, walk.dim_qk, kChunk),
                    walk.k,
                    walk.v,
                    GateWords(walk.i),
                    GateWords(walk.f),
                    map(p.h, walk.heads, walk.dim_v, kBoxRows),
                    map(p.h, walk.heads, walk.dim_v, 1),
                    map(p.h, walk.heads, walk.dim_v, kChunk),
                    p.last,
                    p.row_n,
                    p.row_m,
                    p.chunk_m,
                    p.scale,
                    p.eps,
                    high_and_low(std::log2(static_cast<double>(p.scale)))};
    auto start = [&]<auto kKernel, int kSharedBytes>(int threads, int cluster = 1) {
        launch<kKernel, kSharedBytes>(g, grid(g, "mlstm_fwd"), threads, walk.device, stream, "mlstm_fwd",
                                      cluster);
    };
    if constexpr (kTransposed) {
        with_gate(g.sigmoid_gate, [&]<class P>(P) {
            if constexpr (kNormalize || !P::kStabilised) {
                using C = TransposedConfig<T, TFLA_DIM_QK, TFLA_SLICE_V, kNormalize, P>;
                start.template operator()<mlstm_transposed_kernel<C>, sizeof(TransposedMemory<C>)>(
                    C::kThreads, C::cluster(g.slices));
            } else {
                throw std::runtime_error("mlstm_fwd: the exponential gate comes with a normaliser");
            }
        });
    } else {
        using C = Config<T, TFLA_DIM_QK, TFLA_SLICE_V, kNormalize>;
        static_assert(sizeof(SharedMemoryPlan<C>) * C::kTiling.ctas_per_sm <= MAX_SHARED_MEMORY);
        start.template operator()<mlstm_fwd_kernel<C>, sizeof(SharedMemoryPlan<C>)>(C::kThreads);
    }
}

// Calls run<T, kNormalize>() with the operands' type and whether there is a normaliser.
template <class Run> void with_types(const MlstmFwdWalk& p, Run run) {
    auto with_type = [&]<class T>() {
        if (!p.normalize)
            run.template operator()<T, false>();
        else if constexpr (kMayNormalize)
            run.template operator()<T, true>();
        else
            throw std::runtime_error("mlstm_fwd: this instance has no normaliser");
    };
    p.half ? with_type.template operator()<half>() : with_type.template operator()<bf16>();
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

int mlstm_fwd_ctas_per_multiprocessor() {
    return mlstm::kTransposed ? 1 : mlstm::tiling(TFLA_DIM_QK, TFLA_SLICE_V).ctas_per_sm;
}

std::int64_t mlstm_fwd_workspace_bytes(std::int64_t slots, int dim_qk, int dim_v) {
    return mlstm::Workspace::bytes(slots, dim_qk, dim_v);
}

std::array<std::int64_t, 2> mlstm_fwd_workspace_offsets(std::int64_t slots, int dim_qk, int dim_v) {
    const mlstm::Workspace at_zero(nullptr, slots, dim_qk, dim_v);
    auto offset = [](const float* x) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x));
    };
    return {offset(at_zero.arriving.c), offset(at_zero.arriving.n)};
}

void mlstm_fwd_states(const MlstmFwdWalk& params, void* stream) {
    mlstm::with_types(params, [&]<class T, bool kNormalize>() {
        mlstm::run_states<T, kNormalize>(params, static_cast<cudaStream_t>(stream));
    });
}

void mlstm_fwd(const MlstmFwdParams& params, void* stream) {
    mlstm::with_types(params.walk, [&]<class T, bool kNormalize>() {
        mlstm::run_mlstm_fwd<T, kNormalize>(params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace tfla_tk
