// Host half of the gradients of q, k and the log decay: the two walks over the states (kernel.cuh).
#include <stdexcept>

#include "common/launch.cuh"
#include "delta_rule/backward/states/kernel.cuh"
#include "delta_rule/launch_walk.cuh"

namespace tfla_tk::delta_rule {

inline ResultMaps result_maps(const Operand& x, const DeltaStatesParams& p) {
    const DeltaShape& s = p.shape;
    return ResultMaps::of(
        [&](int rows) { return TensorMap(x, s.batch, s.heads / p.shared, s.seq, s.dim_k, rows, s.half); });
}

// Of V, one for a CTA.
inline int slices_of(const DeltaShape& s) { return (s.dim_v + kSliceColumns - 1) / kSliceColumns; }

// Of one result, of all walkers.
inline std::int64_t low_of_result(const DeltaShape& s, int shared) {
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * (s.heads / shared);
    return heads * low_columns(s.dim_k) * slots_of(s);
}

// Shared results that the GPU serves at once, with CTAs for all turns.
inline int served_at_once(int ctas, int device, const char* name) {
    return std::max(multiprocessors_of(device, name) / ctas, 1);
}

template <class C> StatesGlobals states_globals(const DeltaStatesParams& p) {
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const DeltaShape& s = p.shape;
    const OperandMaps maps(s);
    const int slots = slots_of(s);
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * s.heads;
    const int slices = slices_of(s);
    const int anchors = anchor_slots(slots, kDeltaAnchorChunks);
    return {
        maps.of_keys(p.q),
        maps.of_keys(p.k),
        maps.of_values(p.writes, kChunk),
        maps.of_values(p.dout, kChunk),
        maps.of_values(p.dv, kChunk),
        TensorMap(p.left, s.batch, s.heads / p.shared, s.seq, s.dim_k, kChunk, s.half),
        result_maps(C::kIsLeft ? p.dq : p.dk, p),
        result_maps(C::kIsLeft ? p.left : p.dk, p),
        GateWords(p.g),
        GateWords(p.beta),
        s.cut,
        p.borders,
        s.heads,
        s.group,
        s.seq,
        s.dim_k,
        s.dim_v,
        (s.dim_k + kColumns - 1) / kColumns,
        slices,
        p.shared,
        slots,
        anchors,
        heads * s.seq,
        heads * slots,
        heads * anchors * slices * ((s.dim_k + 15) / 16),
        p.entering,
        p.leaving,
        p.whole,
        p.inter,
        static_cast<uint4*>(p.anchors),
        p.flows,
        slices * p.shared > 1 ? p.written : nullptr,
        static_cast<LowBytes*>(p.low),
        low_of_result(s, p.shared),
        p.scale,
    };
}

template <class C> void launch_states(const DeltaStatesParams& p, void* stream) {
    constexpr auto kName = C::kIsLeft ? "delta_left" : "delta_right";
    if (p.borders && p.shape.cut.segment_chunks != kSegmentChunks)
        throw std::runtime_error(std::string(kName) + ": segments of another length than the borders'");
    const DeviceGuard guard(p.shape.device, kName);
    StatesGlobals g = states_globals<C>(p);
    const std::int64_t ctas = static_cast<std::int64_t>(g.cut.segments) * g.heads * g.slices * g.ctas;
    if (g.written) {
        g.at_once = served_at_once(g.turns() * g.ctas, p.shape.device, kName);
        launch_zeros(g.written, (1 + ctas) * sizeof(int), stream, kName);
    }
    launch<delta_states_kernel<C>, sizeof(StatesMemory<C>)>(g, ctas, C::kThreads, p.shape.device, stream,
                                                            kName);
}

template <StateWalk kWalk> void run_states(const DeltaStatesParams& p, void* stream) {
    with_type(p.shape.half, [&]<class T>() { launch_states<StatesConfig<T, kWalk>>(p, stream); });
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

std::int64_t delta_anchor_bytes(const DeltaShape& s) {
    const std::int64_t anchors = anchor_slots(delta_rule::slots_of(s), kDeltaAnchorChunks);
    const std::int64_t parts = (s.dim_k + 15) / 16 * delta_rule::slices_of(s);
    const std::int64_t bytes_of_part = 2 * 16 * kSliceColumns;
    return anchors * s.batch * s.heads * parts * bytes_of_part;
}

std::int64_t delta_written_bytes(const DeltaShape& s, int shared) {
    const std::int64_t slices = delta_rule::slices_of(s), ctas = (s.dim_k + 127) / 128;
    return slices * shared == 1 ? 0 : sizeof(int) * (1 + slices * ctas * s.cut.segments * s.heads);
}

std::int64_t delta_low_bytes(const DeltaShape& s, int shared) {
    if (delta_rule::slices_of(s) == 1) return 0;
    // of dq and left; in the right walk dk takes the place of dq
    return 2 * delta_rule::low_of_result(s, shared) * sizeof(delta_rule::LowBytes);
}

void delta_left(const DeltaStatesParams& params, void* stream) {
    delta_rule::run_states<delta_rule::StateWalk::left>(params, stream);
}

void delta_right(const DeltaStatesParams& params, void* stream) {
    delta_rule::run_states<delta_rule::StateWalk::right>(params, stream);
}

}  // namespace tfla_tk
