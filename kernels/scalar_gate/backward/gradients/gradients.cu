// Host half of the walk that makes dq, dk and dv at once (kernel.cuh), and of what makes the gradients of the
// gates of its sums (gate_gradients.cuh).
#include <stdexcept>

#include "common/launch.cuh"
#include "scalar_gate/backward/gradients/gate_gradients.cuh"
#include "scalar_gate/backward/gradients/kernel.cuh"

namespace tfla_tk::mlstm {

template <class C> void launch_gradients(const MlstmGradientsParams& p, void* stream) {
    const DeviceGuard guard(p.device, "mlstm_gradients");
    const bool packed = p.cut.offsets != nullptr;
    const int slots = state_slots(p.seq, p.cut.sequences, packed), states = p.batch * p.heads * slots;
    const int64_t of_state = static_cast<int64_t>(p.dim_qk) * p.dim_v;
    auto map = [&](const Operand& x, int heads, int dim, int rows) {
        return TensorMap(x, p.batch, heads, p.seq, dim, rows, p.half);
    };
    auto of_result = [&](const Operand& x, int dim) {
        return ResultMaps::of([&](int rows) { return map(x, p.heads, dim, rows); });
    };
    const GradientsGlobals g{
        map(p.q, p.heads / p.group, p.dim_qk, kChunk),
        map(p.k, p.heads / p.group, p.dim_qk, kChunk),
        map(p.v, p.heads, p.dim_v, kChunk),
        map(p.dh, p.heads, p.dim_v, kChunk),
        TensorMap({p.left.states, states * of_state, of_state, p.dim_qk}, 1, states, p.dim_v, p.dim_qk,
                  C::kDimV, p.half),
        of_result(p.dq, p.dim_qk),
        of_result(p.dk, p.dim_qk),
        of_result(p.dv, p.dim_v),
        p.left.units,
        p.left.norms,
        p.gates,
        p.e,
        p.boundaries,
        p.entering_c,
        p.entering_n,
        p.leaving_c,
        p.leaving_n,
        p.q_dq,
        p.k_dk,
        p.flows,
        p.cut,
        p.heads,
        p.group,
        p.seq,
        chunk_slots(p.seq, p.cut.sequences, packed),
        slots,
        p.dim_qk,
        p.dim_v,
    };
    const std::int64_t ctas = std::int64_t{p.cut.segments} * p.heads;
    launch<mlstm_gradients_kernel<C>, sizeof(GradientsMemory<C>)>(g, ctas, C::kThreads, p.device, stream,
                                                                  "mlstm_gradients");
}

template <class P> void run_gate_gradients(const MlstmGateGradientsParams& p, void* stream) {
    const GateSumsGlobals g{tile_globals(p), p.q_dq, p.k_dk, p.flows, p.parts, p.i, p.f, p.di, p.df,
                            p.chunk_m};
    launch<mlstm_gate_gradients_kernel<P>>(g, ctas_of(g), kTileThreads, p.device, stream,
                                           "mlstm_gate_gradients");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_gradients(const MlstmGradientsParams& p, void* stream) {
    if (std::max(p.dim_qk, p.dim_v) > p.tile)
        throw std::runtime_error("mlstm_gradients: the tile does not hold the head dims");
    with_type(p.half, [&]<class T>() {
        auto run = [&]<bool kNormalizer, bool kSums>() {
            with_tile<64, 128>(p.tile, "mlstm_gradients", [&]<int kTile>() {
                mlstm::launch_gradients<mlstm::GradientsConfig<T, kTile, kNormalizer, kSums>>(p, stream);
            });
        };
        if (p.flows)
            return p.e ? run.template operator()<true, true>() : run.template operator()<false, true>();
        if (p.e) throw std::runtime_error("mlstm_gradients: with a normaliser sums are always made");
        run.template operator()<false, false>();
    });
}

void mlstm_gate_gradients(const MlstmGateGradientsParams& params, void* stream) {
    const DeviceGuard guard(params.device, "mlstm_gate_gradients");
    with_gate(params.gate_kind, [&]<class P>(P) { mlstm::run_gate_gradients<P>(params, stream); });
}

}  // namespace tfla_tk
