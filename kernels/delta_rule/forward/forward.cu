// Forward of the delta rule and the gated delta rule.
//
// Two kernels, or the second one alone, and one in front of them for raw inputs:
//   delta_inputs    the norm of q and k, the sigmoid of beta, the log decay (inputs/forward.cuh)
//   delta_matrices  of every chunk and head, in parallel: A of a triangular system and, where the walk does
//                   not make them, the scores P (chunk_matrices/kernel.cuh). The backward reads them, too.
//   delta_forward   the walk over the chunks. One CTA owns a (sequence, head, 64 or 128 columns of V):
//     producer      loads q, k, v and the matrices; scans the gates; stores O, and the writes for a backward
//     walkers       one or two, the state in registers (forward/walker.cuh)
//     scorer        makes P (scorer.cuh), where kMakesScores
//     maker         in its place: makes A (chunk_matrices/in_walk.cuh). Then the walkers make P, and there is
//                   no delta_matrices
// Where the walk leaves multiprocessors idle, one launch has both: delta_forward_with_makers
// (chunk_matrices/makers.cuh).
// Where few long sequences leave multiprocessors idle, they are split: two more launches give the states with
// which their segments begin.
//   delta_maps      what each segment makes of the state (split/maps.cuh)
//   delta_carry     the states that enter the segments (split/carry.cuh)
// Both skip heads that forget soon, whose walks begin some chunks before their segments. How many these are
// tells, in front of both,
//   delta_leads     (split/leads.cuh)
// Equations: bindings/params.h and docs/delta-rule-kernels.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/chunk_matrices/launch.cuh"
#include "delta_rule/forward/config.cuh"
#include "delta_rule/forward/producer.cuh"
#include "delta_rule/forward/walker.cuh"
#include "delta_rule/forward/wide_walker.cuh"
#include "delta_rule/inputs/forward.cuh"
#include "delta_rule/launch_walk.cuh"
#include "delta_rule/scorer.cuh"
#include "delta_rule/split/launch.cuh"
#include "delta_rule/split/leads.cuh"

#ifndef TFLA_DIM_K
#error "TFLA_DIM_K and TFLA_SCHEDULE choose the instance"
#endif

namespace tfla_tk::delta_rule {

// The block-th CTA of the walk.
template <class C>
__device__ inline void run_walk(const ForwardGlobals& g, unsigned char* shared_memory, int block) {
    auto& smem = *reinterpret_cast<ForwardMemory<C>*>(shared_memory);
    const int warpgroup_id = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
    if (!begin_task<C>(g, smem, block,
                       [&] { g.q.prefetch(), g.k.prefetch(), g.v.prefetch(), g.o.chunk.prefetch(); }))
        return;
    if (warpgroup_id == 0) {
        set_registers<C::kProducerRegisters, C::kThreads, 1>();
        const int warp = warpgroup::warpid();
        if (warp == 0)
            load_tiles(g, smem);
        else if (warp == 1)
            scan_gates(g, smem);
        else if (warp - 2 < C::kWalkers)
            load_values_and_store_outputs(g, smem, warp - 2);
    } else if (warpgroup_id <= C::kWalkers) {
        set_registers<C::kWalkerRegisters, C::kThreads, 1>();
        if constexpr (C::kIsWide)
            walk_forward_wide(g, smem, warpgroup_id - 1);
        else
            walk_forward(g, smem, warpgroup_id - 1);
    } else if (C::kHasScorer && warpgroup_id < C::kWalkWarpgroups) {
        set_registers<C::kScorerRegisters, C::kThreads, 1>();
        if constexpr (C::kMakesMatrices)
            make_matrices_in_walk<C>(g, smem);
        else if constexpr (C::kHasScorer)
            make_scores<C>(g, smem);
    } else if constexpr (C::kIdleWarpgroups > 0) {
        set_registers<C::kIdleRegisters, C::kThreads, 1>();
    }
}

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             1) void delta_forward_kernel(const __grid_constant__ ForwardGlobals g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    run_walk<C>(g, shared_memory, blockIdx.x);
}

// The walk beside makers (chunk_matrices/makers.cuh).
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void delta_forward_with_makers_kernel(
    const __grid_constant__ WithMakers<ForwardGlobals> g) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const int cta = draw_ticket(g.makers.ticket, reinterpret_cast<int&>(*shared_memory));
    if (cta >= g.makers.ctas)
        run_walk<C>(g.walk, shared_memory, cta - g.makers.ctas);
    else
        run_makers<C>(g.makers, shared_memory, cta);
}

template <class C> void launch_forward(const DeltaForwardParams& p, cudaStream_t stream) {
    const DeviceGuard guard(p.shape.device, "delta_forward");
    if (!C::kMakesMatrices && !p.a)
        throw std::runtime_error("delta_forward: a walk that loads A is given none");
    // a map needs some address, though A is neither loaded nor stored where there is none
    void* const a = p.a ? p.a : p.o.data;
    const OperandMaps maps(p.shape);
    const bool keep_writes = p.writes.data != nullptr;
    const Operand& writes = keep_writes ? p.writes : p.o;
    const ForwardGlobals g{
        walk_globals<C>(maps, p, p.q, p.k, p.g, p.beta, a, p.p, p.initial, p.last, p.scale, p.made),
        maps.of_values(p.v, kChunk),
        maps.of_result(p.o),
        maps.of_result(writes),
        keep_writes,
        p.a != nullptr,
    };
    if constexpr (C::kMakerWarpgroups > 0)
        launch_with_makers<delta_forward_with_makers_kernel<C>, C, ForwardMemory<C>>(g, p, stream,
                                                                                     "delta_forward");
    else
        launch<delta_forward_kernel<C>, sizeof(ForwardMemory<C>)>(
            g, walk_grid(g, "delta_forward"), C::kThreads, p.shape.device, stream, "delta_forward");
}

template <class T> void run_forward(const DeltaForwardParams& p, cudaStream_t stream) {
    constexpr auto kSchedule = static_cast<Schedule>(TFLA_SCHEDULE);
    if (p.makes_matrices) {
        if constexpr (TFLA_DIM_K != 128)
            throw std::runtime_error("delta_forward: a walk makes its matrices only where 64 < K <= 128");
        else if (p.walkers != 2 || p.makers > 0 || p.carried)
            throw std::runtime_error(
                "delta_forward: a walk makes its matrices only with two walkers, without makers or a split");
        else
            launch_forward<ForwardConfig<T, TFLA_DIM_K, 2, kSchedule, 0, true>>(p, stream);
    } else if (p.makers > 0) {
        if constexpr (TFLA_DIM_K > 128)
            throw std::runtime_error("delta_forward: no makers where K > 128");
        else if (p.walkers == 1)
            launch_forward<ForwardConfig<T, TFLA_DIM_K, 1, kSchedule, kWarpgroupsOfMakers>>(p, stream);
        else
            launch_forward<ForwardConfig<T, TFLA_DIM_K, 2, kSchedule, kWarpgroupsOfMakers>>(p, stream);
    } else if (p.walkers == 1)
        launch_forward<ForwardConfig<T, TFLA_DIM_K, 1, kSchedule>>(p, stream);
    else
        launch_forward<ForwardConfig<T, TFLA_DIM_K, 2, kSchedule>>(p, stream);
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_matrices(const DeltaMatricesParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? delta_rule::run_matrices<kittens::half, TFLA_DIM_K>(params, s)
                      : delta_rule::run_matrices<kittens::bf16, TFLA_DIM_K>(params, s);
}

void delta_leads(const DeltaLeadsParams& params, void* stream) {
    delta_rule::launch_leads(params, static_cast<cudaStream_t>(stream));
}

void delta_forward(const DeltaForwardParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? delta_rule::run_forward<kittens::half>(params, s)
                      : delta_rule::run_forward<kittens::bf16>(params, s);
}

void delta_maps(const DeltaMapsParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    if constexpr (TFLA_DIM_K > 128)
        throw std::runtime_error("delta_maps: no split where K > 128");
    else
        params.shape.half ? delta_rule::launch_maps<kittens::half, TFLA_DIM_K>(params, s)
                          : delta_rule::launch_maps<kittens::bf16, TFLA_DIM_K>(params, s);
}

void delta_carry(const DeltaCarryParams& params, void* stream) {
    delta_rule::launch_carry(params, static_cast<cudaStream_t>(stream));
}

void delta_inputs(const DeltaInputsParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? delta_rule::run_inputs<kittens::half, TFLA_DIM_K>(params, s)
                      : delta_rule::run_inputs<kittens::bf16, TFLA_DIM_K>(params, s);
}

}  // namespace tfla_tk
