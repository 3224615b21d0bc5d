// Forward of gated linear attention (GLA): a decay per token, head and key channel.
//
// One kernel. A CTA walks the chunks of a (sequence, head, 64 or 128 columns of V):
//   gate warps  make of q, k and the log gates, a chunk ahead, the operands of the walk and the scores P, in
//               shared memory; one of them loads and stores (forward/gates.cuh)
//   walkers     one or two, the state in registers (forward/walker.cuh)
// Equations: bindings/params.h, block.cuh and docs/gla.md.
#include <stdexcept>

#include "channel_gate/forward/config.cuh"
#include "channel_gate/forward/gates.cuh"
#include "channel_gate/forward/walker.cuh"
#include "common/launch.cuh"

#ifndef TFLA_DIM_K
#error "TFLA_DIM_K and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::channel_gate {

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void gla_forward_kernel(const __grid_constant__ ForwardGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<ForwardMemory<C>*>(shared_memory);
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    smem.init_tiles();
    if (!begin_task<C>(g, smem, blockIdx.x, [&] {
            g.q.prefetch(), g.k.prefetch(), g.gates.map.prefetch(), g.v.prefetch(), g.o.prefetch();
        }))
        return;
    if (cluster_ctas() > 1) cluster_sync();  // the other CTA has initialised its barriers
    if (warp < C::kGateWarps) {
        set_registers<C::kGateRegisters, C::kThreads, 1>();
        run_gates(g, smem, warp);
    } else {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        walk_forward(g, smem, (warp - C::kGateWarps) / 4);
    }
    if (cluster_ctas() > 1) cluster_sync();  // the other CTA may still write to this one's shared memory
}

template <class C> void launch_forward(const GlaForwardParams& p, cudaStream_t stream) {
    const ChannelShape& s = p.shape;
    const DeviceGuard guard(s.device, "gla_forward");
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
        p.other_dim_k,
        p.adds,
    };
    const auto ctas = static_cast<std::int64_t>(s.cut.segments) * g.heads * g.ctas;
    launch<gla_forward_kernel<C>, sizeof(ForwardMemory<C>)>(g, grid_of(ctas, 1, "gla_forward"), C::kThreads,
                                                            s.device, stream, "gla_forward",
                                                            g.ctas % 2 == 0 ? 2 : 1);
}

template <class T> void run_forward(const GlaForwardParams& p, cudaStream_t stream) {
    constexpr auto kSchedule = static_cast<Schedule>(TFLA_SCHEDULE);
    p.walkers == 1 ? launch_forward<ForwardConfig<T, TFLA_DIM_K, 1, kSchedule>>(p, stream)
                   : launch_forward<ForwardConfig<T, TFLA_DIM_K, 2, kSchedule>>(p, stream);
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

void gla_forward(const GlaForwardParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? channel_gate::run_forward<kittens::half>(params, s)
                      : channel_gate::run_forward<kittens::bf16>(params, s);
}

}  // namespace tfla_tk
