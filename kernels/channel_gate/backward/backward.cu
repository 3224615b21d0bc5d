// The mirror walk of the backward of gated linear attention (GLA): dV, and the gradient of the first state.
//
// One kernel: the forward's walk (forward/forward.cu) from the last chunk to the first. The gate warps make
// the same of a chunk; the walkers carry the state's gradient. Equations: bindings/params_backward.h and
// docs/gla.md.
#include <stdexcept>

#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/forward/config.cuh"
#include "channel_gate/forward/gates.cuh"
#include "channel_gate/forward/walker.cuh"
#include "common/launch.cuh"

#ifndef TFLA_DIM_K
#error "TFLA_DIM_K and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::channel_gate {

template <class T, int kDim, int kCount, Schedule kOrder>
struct MirrorConfig : ForwardConfig<T, kDim, kCount, kOrder> {
    static constexpr bool kBackward = true;
};

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void gla_mirror_kernel(const __grid_constant__ ForwardGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<ForwardMemory<C>*>(shared_memory);
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    smem.init_tiles();
    if (!begin_task<C>(g, smem, blockIdx.x, [&] {
            g.q.prefetch(), g.k.prefetch(), g.gates.map.prefetch(), g.v.prefetch(), g.o.prefetch();
        }))
        return;
    if (warp < C::kGateWarps) {
        set_registers<C::kGateRegisters, C::kThreads, 1>();
        run_gates(g, smem, warp);
    } else {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        walk_forward(g, smem, (warp - C::kGateWarps) / 4);
    }
}

template <class C> void launch_mirror(const GlaForwardParams& p, cudaStream_t stream) {
    const ChannelShape& s = p.shape;
    const DeviceGuard guard(s.device, "gla_mirror");
    auto map = [&](const Operand& x, int dim, int box_rows) {
        return TensorMap(x, s.batch, s.heads, s.seq, dim, box_rows, s.half);
    };
    const int gate_rows = p.g_dtype == DType::float32 ? kChunk : kBlock;
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const ForwardGlobals g{
        map(p.q, s.dim_k, kChunk),
        map(p.k, s.dim_k, kChunk),
        map(p.v, s.dim_v, kChunk),
        {TensorMap::rows(p.g, s.batch, s.heads, s.seq, s.dim_k, gate_rows, p.g_dtype), p.g_dtype},
        map(p.o, s.dim_v, kChunk),
        map(p.o, s.dim_v, kBoxRows),
        map(p.o, s.dim_v, 1),
        s.cut,
        s.heads,
        s.seq,
        s.dim_k,
        s.dim_v,
        (s.dim_v + kColumns - 1) / kColumns,
        p.scale,
        p.initial,
        p.last,
    };
    const auto ctas = static_cast<std::int64_t>(s.cut.segments) * g.heads * g.ctas;
    launch<gla_mirror_kernel<C>, sizeof(ForwardMemory<C>)>(g, grid_of(ctas, 1, "gla_mirror"), C::kThreads,
                                                           s.device, stream, "gla_mirror");
}

template <class T> void run_mirror(const GlaForwardParams& p, cudaStream_t stream) {
    constexpr auto kSchedule = static_cast<Schedule>(TFLA_SCHEDULE);
    p.walkers == 1 ? launch_mirror<MirrorConfig<T, TFLA_DIM_K, 1, kSchedule>>(p, stream)
                   : launch_mirror<MirrorConfig<T, TFLA_DIM_K, 2, kSchedule>>(p, stream);
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

void gla_mirror(const GlaForwardParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? channel_gate::run_mirror<kittens::half>(params, s)
                      : channel_gate::run_mirror<kittens::bf16>(params, s);
}

}  // namespace tfla_tk
