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
#include "common/launch.cuh"
#include "delta_rule/backward/combine.cuh"
#include "delta_rule/backward/kernel.cuh"
#include "delta_rule/backward/strength.cuh"
#include "delta_rule/inputs/backward.cuh"
#include "delta_rule/launch_walk.cuh"

namespace tfla_tk::delta_rule {

template <class C> void launch_mirror(const DeltaMirrorParams& p, void* stream) {
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
    launch<delta_mirror_kernel<C>, sizeof(MirrorMemory<C>)>(g, ctas_of(g), C::kThreads, p.shape.device,
                                                            stream, "delta_mirror");
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_mirror(const DeltaMirrorParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_mirror", [&]<class T, int kDimK>() {
        if constexpr (kDimK > 128)
            if (p.walkers == 1) return launch_mirror<MirrorConfig<T, kDimK, 1>>(p, stream);
        launch_mirror<MirrorConfig<T, kDimK, 2>>(p, stream);
    });
}

void delta_combine(const DeltaCombineParams& p, void* stream) {
    using namespace delta_rule;
    constexpr int kThreads = delta_rule::kCombineThreads;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_combine");
    const int64_t units = static_cast<int64_t>(s.batch) * s.seq * (s.heads / s.group) * (s.dim_k / kUnit);
    with_type(s.half, [&]<class T>() {
        launch<delta_combine_kernel<T>>(p, parts_of(units, kThreads), kThreads, s.device, stream,
                                        "delta_combine");
    });
}

void delta_strength(const DeltaStrengthParams& p, void* stream) {
    using namespace delta_rule;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_strength");
    const std::int64_t ctas = parts_of(s.seq, kStrengthTokens) * s.batch * parts_of(s.heads, kStrengthHeads);
    launch<delta_strength_kernel>(p, ctas, kStrengthThreads, s.device, stream, "delta_strength");
}

void delta_inputs_backward(const DeltaInputsBackwardParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_inputs_backward", [&]<class T, int kDimK>() {
        launch_inputs<delta_inputs_backward_kernel<T, kDimK>, Row<T, kDimK>::kRows>(
            p, p.dq.data != nullptr, p.d_strength != nullptr || p.d_log_decay != nullptr, stream,
            "delta_inputs_backward");
    });
}

}  // namespace tfla_tk
