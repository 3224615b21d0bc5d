// Host half of the forward of the delta rule and the gated delta rule.
//
// Two kernels, or the second one alone, and one in front of them for raw inputs:
//   delta_inputs    the norm of q and k, the sigmoid of beta, the log decay (inputs/forward.cuh)
//   delta_matrices  of every chunk and head, in parallel: A of a triangular system and, where the walk does
//                   not make them, the scores P (chunk_matrices/kernel.cuh). The backward reads them, too.
//   delta_forward   the walk over the chunks (forward/kernel.cuh). It may make A itself; then there is no
//                   delta_matrices. Where it leaves multiprocessors idle, one launch has both
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
#include "delta_rule/forward/kernel.cuh"
#include "delta_rule/inputs/forward.cuh"
#include "delta_rule/launch_walk.cuh"
#include "delta_rule/split/launch.cuh"
#include "delta_rule/split/leads.cuh"

namespace tfla_tk::delta_rule {

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
        p.states,
    };
    if constexpr (C::kMakerWarpgroups > 0)
        launch_with_makers<delta_forward_with_makers_kernel<C>, C, ForwardMemory<C>>(g, p, stream,
                                                                                     "delta_forward");
    else
        launch<delta_forward_kernel<C>, sizeof(ForwardMemory<C>)>(
            g, walk_grid(g, "delta_forward"), C::kThreads, p.shape.device, stream, "delta_forward");
}

template <class T, int kDimK> void run_forward(const DeltaForwardParams& p, cudaStream_t stream) {
    if (p.makes_matrices) {
        if constexpr (kDimK != 128)
            throw std::runtime_error("delta_forward: a walk makes its matrices only where 64 < K <= 128");
        else if (p.walkers != 2 || p.makers > 0 || p.carried)
            throw std::runtime_error(
                "delta_forward: a walk makes its matrices only with two walkers, without makers or a split");
        else
            launch_forward<ForwardConfig<T, kDimK, 2, 0, true>>(p, stream);
    } else if (p.makers > 0) {
        if constexpr (kDimK > 128)
            throw std::runtime_error("delta_forward: no makers where K > 128");
        else if (p.walkers == 1)
            launch_forward<ForwardConfig<T, kDimK, 1, kWarpgroupsOfMakers>>(p, stream);
        else
            launch_forward<ForwardConfig<T, kDimK, 2, kWarpgroupsOfMakers>>(p, stream);
    } else if (p.walkers == 1)
        launch_forward<ForwardConfig<T, kDimK, 1>>(p, stream);
    else
        launch_forward<ForwardConfig<T, kDimK, 2>>(p, stream);
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_matrices(const DeltaMatricesParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_matrices", [&]<class T, int kDimK>() {
        delta_rule::run_matrices<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

void delta_leads(const DeltaLeadsParams& params, void* stream) {
    delta_rule::launch_leads(params, static_cast<cudaStream_t>(stream));
}

void delta_forward(const DeltaForwardParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_forward", [&]<class T, int kDimK>() {
        delta_rule::run_forward<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

void delta_maps(const DeltaMapsParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_maps", [&]<class T, int kDimK>() {
        if constexpr (kDimK > 128)
            throw std::runtime_error("delta_maps: no split where K > 128");
        else
            delta_rule::launch_maps<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

void delta_carry(const DeltaCarryParams& params, void* stream) {
    delta_rule::launch_carry(params, static_cast<cudaStream_t>(stream));
}

void delta_inputs(const DeltaInputsParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_inputs", [&]<class T, int kDimK>() {
        delta_rule::run_inputs<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace tfla_tk
