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
#include <algorithm>
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/chunk_matrices/kernel.cuh"
#include "delta_rule/chunk_matrices/makers.cuh"
#include "delta_rule/forward/kernel.cuh"
#include "delta_rule/inputs/forward.cuh"
#include "delta_rule/launch_walk.cuh"
#include "delta_rule/split/carry.cuh"
#include "delta_rule/split/leads.cuh"
#include "delta_rule/split/maps.cuh"

namespace tfla_tk::delta_rule {

// p: DeltaMatricesParams, or the parameters of a walk, which have the same fields but for the bounds.
template <class Params> MatricesGlobals matrices_globals(const Params& p, ChunkBounds* bounds = nullptr) {
    const DeltaShape& s = p.shape;
    const OperandMaps maps(s);
    Cut chunks = s.cut;  // every chunk is a segment
    const int slots = slots_of(s);
    chunks.segment_chunks = 1, chunks.segments = s.cut.offsets ? slots : s.cut.sequences * slots;
    return {maps.of_keys(p.q),
            maps.of_keys(p.k),
            maps.of_matrices(p.a),
            maps.of_matrices(p.p ? p.p : p.a),
            GateWords(p.g),
            GateWords(p.beta),
            chunks,
            s.heads,
            s.group,
            s.seq,
            slots,
            p.scale,
            bounds};
}

template <class T, int kDimK, bool kWithScores>
void launch_matrices(const DeltaMatricesParams& p, void* stream) {
    const DeviceGuard guard(p.shape.device, "delta_matrices");
    const MatricesGlobals g = matrices_globals(p, p.bounds);
    const std::int64_t ctas = static_cast<std::int64_t>(g.cut.segments) * g.heads;
    launch<delta_matrices_kernel<T, kDimK, kWithScores>, sizeof(MatricesMemory<T, kDimK, kWithScores>)>(
        g, ctas, 128, p.shape.device, stream, "delta_matrices");
}

// Launches a walk with p.makers CTAs of makers. The results are right for any number of CTAs; the launch is
// fast where all run at once.
template <auto kKernel, class C, class Memory, class Walk, class Params>
void launch_with_makers(const Walk& walk, const Params& p, void* stream, const char* name) {
    const MatricesGlobals matrices = matrices_globals(p);
    const std::size_t flags = static_cast<std::size_t>(p.shape.batch) * p.shape.heads * matrices.slots;
    MakersGlobals makers{matrices, p.made, p.made + flags, p.makers};
    makers.ahead = std::max(kLeastAhead, kChunksInL2 / makers.pairs());
    launch_zeros(p.made, (flags + 2) * sizeof(*p.made), stream, name);
    constexpr int kBytes = std::max(sizeof(Memory), sizeof(MakersMemory<C>));
    launch<kKernel, kBytes>(WithMakers<Walk>{walk, makers}, ctas_of(walk) + p.makers, C::kThreads,
                            p.shape.device, stream, name);
}

template <class C> void launch_forward(const DeltaForwardParams& p, void* stream) {
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
        launch<delta_forward_kernel<C>, sizeof(ForwardMemory<C>)>(g, ctas_of(g), C::kThreads, p.shape.device,
                                                                  stream, "delta_forward");
}

template <class T, int kDimK> void launch_maps(const DeltaMapsParams& p, void* stream) {
    using C = MapsConfig<T, kDimK>;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_maps");
    const OperandMaps maps(s);
    const TensorMap keys = maps.of_keys(p.k), a = maps.of_matrices(p.a);
    MapsGlobals g{
        {keys,    keys,      a,       a,       GateWords(p.g), GateWords(p.beta), s.cut, p.initial,
         nullptr, p.carried, p.leads, nullptr, s.heads,        s.group,           s.seq, s.dim_k,
         s.dim_v, 0,         0.f,     nullptr, slots_of(s)},
        maps.of_values(p.v, kChunk),
        p.maps,
        p.transposed,
    };
    g.ctas = parts_of(g.value_columns() / kWalkerColumns + parts_of(s.dim_k, kWalkerColumns), C::kWalkers);
    launch<delta_maps_kernel<C>, sizeof(MapsMemory<C>)>(g, ctas_of(g), C::kThreads, s.device, stream,
                                                        "delta_maps");
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_matrices(const DeltaMatricesParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_matrices", [&]<class T, int kDimK>() {
        // whether there are walks of this K that make P, and such that do not
        constexpr bool kSomeMake = kMakesScores<kDimK, 2, 0>, kSomeDoNot = !kMakesScores<kDimK, 1, 0>;
        if (p.p ? !kSomeDoNot : !kSomeMake)
            throw std::runtime_error("delta_matrices: P is wanted or left out where no walk has it so");
        if constexpr (kSomeDoNot)
            if (p.p) return launch_matrices<T, kDimK, true>(p, stream);
        if constexpr (kSomeMake) launch_matrices<T, kDimK, false>(p, stream);
    });
}

void delta_leads(const DeltaLeadsParams& p, void* stream) {
    using namespace delta_rule;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_leads");
    const LeadsGlobals g{s.cut, s.heads, s.seq, slots_of(s), p.bounds, p.leads, p.longest};
    const std::int64_t ctas = static_cast<std::int64_t>(s.cut.sequences) * s.heads;
    launch<delta_leads_kernel>(g, grid_of(ctas, p.both ? 2 : 1, "delta_leads"), 32 * kLeadWarps, s.device,
                               stream, "delta_leads");
}

void delta_forward(const DeltaForwardParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_forward", [&]<class T, int kDimK>() {
        if (p.makes_matrices) {
            if constexpr (kDimK != 128)
                throw std::runtime_error("delta_forward: a walk makes its matrices only where 64 < K <= 128");
            else if (p.walkers != 2 || p.makers > 0 || p.carried)
                throw std::runtime_error(
                    "delta_forward: a walk makes its matrices only with two walkers, without makers or a "
                    "split");
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
    });
}

void delta_maps(const DeltaMapsParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_maps", [&]<class T, int kDimK>() {
        if constexpr (kDimK > 128)
            throw std::runtime_error("delta_maps: no split where K > 128");
        else
            launch_maps<T, kDimK>(p, stream);
    });
}

void delta_carry(const DeltaCarryParams& p, void* stream) {
    using namespace delta_rule;
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_carry");
    const CarryGlobals g{s.cut, p.carried, p.leads, p.maps, s.heads, s.seq, s.dim_k, s.dim_v, p.backward};
    const std::int64_t ctas =
        static_cast<std::int64_t>(carrying_ctas(s.cut)) * s.heads * (s.dim_v / kCarryColumns);
    launch<delta_carry_kernel>(g, ctas, 32 * kCarryWarps, s.device, stream, "delta_carry");
}

void delta_inputs(const DeltaInputsParams& p, void* stream) {
    using namespace delta_rule;
    with_type_and_tile(p.shape, "delta_inputs", [&]<class T, int kDimK>() {
        launch_inputs<delta_inputs_kernel<T, kDimK>, Row<T, kDimK>::kRows>(
            p, p.unit_q.data != nullptr, p.strength != nullptr || p.log_decay != nullptr, stream,
            "delta_inputs");
    });
}

}  // namespace tfla_tk
