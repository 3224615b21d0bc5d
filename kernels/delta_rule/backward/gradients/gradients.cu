// Host half of the walk that makes dq, dk and dV at once, and of what makes dg from its sums.
#include "common/launch.cuh"
#include "delta_rule/backward/gradients/decay.cuh"
#include "delta_rule/backward/gradients/kernel.cuh"
#include "delta_rule/launch_walk.cuh"

namespace tfla_tk::delta_rule {

template <class C> void launch_gradients(const DeltaGradientsParams& p, void* stream) {
    const DeltaShape& s = p.shape;
    const DeviceGuard guard(s.device, "delta_gradients");
    if (s.dim_k > C::kDimK) throw std::runtime_error("delta_gradients: K is at most 128");
    const OperandMaps maps(s);
    const int slices = parts_of(s.dim_v, C::kDimV), slots = slots_of(s);
    const std::int64_t heads = static_cast<std::int64_t>(s.batch) * s.heads;
    const int of_states = heads * slots;
    const std::int64_t state = static_cast<std::int64_t>(s.dim_k) * s.dim_v;
    // NOTES: maps of what a walk does not use are of something else
    auto of_result = [&](const Operand& x) {
        return ResultMaps::of([&](int rows) {
            if (slices > 1) return maps.of_keys(p.q);
            return TensorMap(x, s.batch, s.heads, s.seq, s.dim_k, rows, s.half);
        });
    };
    const GradientsGlobals g{
        walk_globals<C>(maps, p, p.q, p.k, p.g, p.beta, p.a, nullptr, p.d_last, p.d_initial, p.scale),
        maps.of_values(p.dout, kChunk),
        maps.of_values(p.writes, kChunk),
        TensorMap(Operand{p.states, of_states * state, state, s.dim_k}, 1, of_states, s.dim_v, s.dim_k,
                  C::kDimV, s.half),
        of_result(p.dq),
        of_result(p.dk),
        static_cast<float*>(p.dq.data),
        static_cast<float*>(p.dk.data),
        slices > 1 ? p.turns : nullptr,
        maps.of_result(p.dv),
        slices,
        heads * s.seq,
        heads * slots,
        p.strengths,
        p.token_sums,
        p.flows,
    };
    if (g.turns) launch_zeros(g.turns, (1 + g.chunk_rows) * sizeof(int), stream, "delta_gradients");
    launch<delta_gradients_kernel<C>, sizeof(GradientsMemory<C>)>(g, ctas_of(g), C::kThreads, s.device,
                                                                  stream, "delta_gradients");
}

}  // namespace tfla_tk::delta_rule

namespace tfla_tk {

void delta_gradients(const DeltaGradientsParams& p, void* stream) {
    using namespace delta_rule;
    with_type(p.shape.half, [&]<class T>() {
        p.flows ? launch_gradients<GradientsConfig<T, true>>(p, stream)
                : launch_gradients<GradientsConfig<T, false>>(p, stream);
    });
}

void delta_decay(const DeltaDecayParams& p, void* stream) {
    using namespace delta_rule;
    const DeviceGuard guard(p.shape.device, "delta_decay");
    const std::int64_t ctas = static_cast<std::int64_t>(p.shape.cut.segments) * p.shape.heads;
    launch<delta_decay_kernel>(p, ctas, kDecayThreads, p.shape.device, stream, "delta_decay");
}

}  // namespace tfla_tk
