// Host half of the gradients' kernel.
#include "kda/gradients/kernel.cuh"
#include "kda/launch_walk.cuh"

namespace tfla_tk::kda {

template <class T, int kDimK> void launch_gradients(const KdaGradientsParams& p, void* stream) {
    constexpr const char* kName = "kda_gradients";
    const KdaMatricesParams& of = p.of;
    const KdaShape& s = of.shape;
    const DeviceGuard guard(s.device, kName);
    const int slots = slots_of(s);
    const Cut chunks = every_chunk(s);
    const GradientsGlobals g{
        map_of_keys(s, of.q),
        map_of_keys(s, of.k),
        TensorMap::rows(of.g, s.batch, s.heads, s.seq, s.dim_k, kBlock, of.g_type),
        map_of_values(s, p.v, kChunk),
        map_of_values(s, p.d_out, kChunk),
        map_of_values(s, p.solved, kChunk),
        map_of_left(s, of.left.tiles, slots * kTiles * kChunk, kDimK),
        map_of_matrices(s, of.left.a),
        p,
        chunks,
        slots,
        groups_of(s),
    };
    if (g.groups > kGroups) throw std::runtime_error("kda_gradients: V is more than 128");
    using Memory = GradientsMemory<T, kDimK>;
    const std::int64_t ctas = static_cast<std::int64_t>(chunks.segments) * s.heads;
    launch<kda_gradients_kernel<T, kDimK>, sizeof(Memory)>(g, ctas, kGradientsThreads, s.device, stream,
                                                           kName);
}

}  // namespace tfla_tk::kda

namespace tfla_tk {

void kda_gradients(const KdaGradientsParams& params, void* stream) {
    kda::with_type_and_tile(params.of.shape, "kda_gradients",
                            [&]<class T, int kDimK>() { kda::launch_gradients<T, kDimK>(params, stream); });
}

}  // namespace tfla_tk
