// Host half of what the backward of the delta rule has of its own: the gradients of the values, of beta and
// of the states.
//
// It reads the A that the forward has made, and without a scorer its P. Kernels:
//   delta_mirror    the walk from the last chunk to the first (backward/kernel.cuh)
// Where few long sequences leave multiprocessors idle, they are split: walks of heads that forget soon begin
// some chunks behind their segments, as the forward has found; for the others a walk that leaves states alone
// and delta_carry (split/carry.cuh) give the gradients of the states with which the segments begin.
// dq, dk and dg follow from dO, writes and dV by the walks of states/, and then
//   delta_combine   adds up the parts of dq and dk that the walks over the states leave
//   delta_strength  gives dbeta of the sums that the mirror leaves
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

template <class C> RightGlobals right_globals(const OperandMaps& maps, const DeltaMirrorParams& p) {
    const DeltaShape& s = p.shape;
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * s.heads;
    const int slices = (s.dim_v + C::kDimV - 1) / C::kDimV, slots = slots_of(s);
    auto boxes = [&](int rows) {
        // NOTES: maps of what a walk does not use are of something else
        if constexpr (!C::kMakesRight) return maps.of_keys(p.k);
        return TensorMap(p.right.dk, s.batch, s.heads * slices, s.seq, s.dim_k, rows, s.half);
    };
    return {ResultMaps::of(boxes),
            slices,
            (s.dim_k + 15) / 16,
            anchor_slots(slots, kDeltaAnchorChunks),
            heads * s.seq,
            heads * slots,
            p.right.whole,
            p.right.inter,
            static_cast<uint4*>(p.right.anchors)};
}

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
        p.dbeta,
        static_cast<std::int64_t>(p.shape.batch) * p.shape.heads * p.shape.seq,
        right_globals<C>(maps, p),
    };
    launch<delta_mirror_kernel<C>, sizeof(MirrorMemory<C>)>(g, walk_grid(g, "delta_mirror"), C::kThreads,
                                                            p.shape.device, stream, "delta_mirror");
}

template <class T, int kDimK> void run_mirror(const DeltaMirrorParams& p, cudaStream_t stream) {
    if (p.right.dk.data) {
        if constexpr (kDimK == 128) {
            if (p.walkers != 2)
                throw std::runtime_error("delta_mirror: two walkers make the right part of dk");
            if (p.right.whole)
                launch_mirror<MirrorConfig<T, 128, 2, MirrorMakes::right_part_and_sums>>(p, stream);
            else
                launch_mirror<MirrorConfig<T, 128, 2, MirrorMakes::right_part>>(p, stream);
        } else {
            throw std::runtime_error("delta_mirror: the right part of dk is made for 64 < K <= 128");
        }
    } else if (p.states_alone) {
        if constexpr (kDimK > 128)
            throw std::runtime_error("delta_mirror: no split where K > 128");
        else if (p.walkers == 1)
            launch_mirror<MirrorConfig<T, kDimK, 1, MirrorMakes::states>>(p, stream);
        else
            launch_mirror<MirrorConfig<T, kDimK, 2, MirrorMakes::states>>(p, stream);
    } else if (p.walkers == 1)
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
