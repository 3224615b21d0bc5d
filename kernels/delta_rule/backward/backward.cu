// Host half of what the backward of the delta rule has of its own, but for the walks of gradients/ and
// states/.
//
// With K up to 128 one walk makes dq, dk and dV (gradients/). It reads the A that the forward has made. Where
// few long sequences leave multiprocessors idle, they are split: walks of heads that forget soon begin some
// chunks behind their segments, as the forward has found. For the others a mirror, which leaves states alone,
// and delta_carry (split/carry.cuh) give the gradients of the states with which the segments begin.
//
// With K of more than 128 there are three walks: a mirror for dV, and those of states/ for dq and dk.
//
// Kernels:
//   delta_mirror    a walk from the last chunk to the first (backward/kernel.cuh)
//   delta_combine   adds up parts of dq and dk
//   delta_strength  gives dbeta of the sums that a walk leaves
//   delta_inputs_backward  turns gradients into those of raw inputs (inputs/backward.cuh)
// Equations: bindings/params.h and docs/delta-rule-backward.md.
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/backward/combine.cuh"
#include "delta_rule/backward/kernel.cuh"
#include "delta_rule/backward/strength.cuh"
#include "delta_rule/inputs/backward.cuh"
#include "delta_rule/launch_walk.cuh"
#include "delta_rule/split/launch.cuh"

namespace tfla_tk::delta_rule {

template <class C> void launch_mirror(const DeltaMirrorParams& p, cudaStream_t stream) {
    const DeviceGuard guard(p.shape.device, "delta_mirror");
    const OperandMaps maps(p.shape);
    // NOTES: maps of what a walk does not use are of something else
    const Operand &writes = C::kStatesAlone ? p.dout : p.writes, &dv = C::kStatesAlone ? p.dout : p.dv;
    const MirrorGlobals g{
        walk_globals<C>(maps, p, p.q, p.k, p.g, p.beta, p.a, p.p, p.d_last, p.d_initial, p.scale),
        maps.of_values(p.dout, kChunk),
        maps.of_values(writes, kChunk),
        maps.of_result(dv),
        p.strengths,
        static_cast<std::int64_t>(p.shape.batch) * p.shape.heads * p.shape.seq,
    };
    launch<delta_mirror_kernel<C>, sizeof(MirrorMemory<C>)>(g, walk_grid(g, "delta_mirror"), C::kThreads,
                                                            p.shape.device, stream, "delta_mirror");
}

template <class T, int kDimK> void run_mirror(const DeltaMirrorParams& p, cudaStream_t stream) {
    if constexpr (kDimK <= 128)
        launch_mirror<MirrorConfig<T, kDimK, 2>>(p, stream);
    else if (p.walkers == 1)
        launch_mirror<MirrorConfig<T, kDimK, 1>>(p, stream);
    else
        launch_mirror<MirrorConfig<T, kDimK, 2>>(p, stream);
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_mirror(const DeltaMirrorParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_mirror", [&]<class T, int kDimK>() {
        delta_rule::run_mirror<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

void delta_combine(const DeltaCombineParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? delta_rule::launch_combine<kittens::half>(params, s)
                      : delta_rule::launch_combine<kittens::bf16>(params, s);
}

void delta_strength(const DeltaStrengthParams& params, void* stream) {
    delta_rule::launch_strength(params, static_cast<cudaStream_t>(stream));
}

void delta_inputs_backward(const DeltaInputsBackwardParams& params, void* stream) {
    delta_rule::with_type_and_tile(params.shape, "delta_inputs_backward", [&]<class T, int kDimK>() {
        delta_rule::run_inputs_backward<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace tfla_tk
