// Host half of KDA's forward: two kernels.
//   kda_matrices  of every chunk and head, in parallel: the matrices A and P, and all that the walk needs
//                 of q, k, g and beta (matrices/kernel.cuh)
//   kda_forward   the walk over the chunks (forward/kernel.cuh)
// Equations: bindings/params.h.
#include "kda/forward/kernel.cuh"
#include "kda/launch_walk.cuh"
#include "kda/matrices/kernel.cuh"

namespace tfla_tk::kda {

template <class T, int kDimK> void launch_matrices(const KdaMatricesParams& p, void* stream) {
    constexpr const char* kName = "kda_matrices";
    const KdaShape& s = p.shape;
    const DeviceGuard guard(s.device, kName);
    const int slots = slots_of(s);
    const Cut chunks = every_chunk(s);
    const MatricesGlobals g{
        map_of_keys(s, p.q),
        map_of_keys(s, p.k),
        TensorMap::rows(p.g, s.batch, s.heads, s.seq, s.dim_k, kBlock, p.g_type),
        map_of_matrices(s, p.left.a),
        map_of_matrices(s, p.left.p),
        p,
        GateWords(p.beta),
        chunks,
        slots,
    };
    using Memory = MatricesMemory<T, kDimK>;
    static_assert(kMatricesCtas * (sizeof(Memory) + 1024) <= 228 * 1024);
    const std::int64_t ctas = static_cast<std::int64_t>(chunks.segments) * s.heads;
    launch<kda_matrices_kernel<T, kDimK>, sizeof(Memory)>(g, ctas, kMatricesThreads, s.device, stream, kName);
}

}  // namespace tfla_tk::kda

namespace tfla_tk {

std::array<std::int64_t, 3> kda_tiles_bytes(const KdaShape& shape) {
    const std::int64_t chunks = static_cast<std::int64_t>(shape.batch) * shape.heads * kda::slots_of(shape);
    const int tile = kda::tile_of_k(shape);
    const std::size_t factors = tile == 64 ? sizeof(kda::Factors<64>) : sizeof(kda::Factors<128>);
    return {chunks * kda::kTiles * kChunk * tile * 2, chunks * static_cast<std::int64_t>(factors),
            chunks * kChunk * kChunk * 2};
}

std::int64_t kda_states_bytes(const KdaShape& shape) {
    const std::int64_t chunks = static_cast<std::int64_t>(shape.batch) * shape.heads * kda::slots_of(shape);
    const int groups = kda::groups_of(shape);
    return kda::tile_of_k(shape) == 64 ? kda::StateFragments<64>::bytes(chunks, groups)
                                       : kda::StateFragments<128>::bytes(chunks, groups);
}

void kda_matrices(const KdaMatricesParams& params, void* stream) {
    kda::with_type_and_tile(params.shape, "kda_matrices",
                            [&]<class T, int kDimK>() { kda::launch_matrices<T, kDimK>(params, stream); });
}

void kda_forward(const KdaWalkParams& params, void* stream) {
    kda::with_walk(params, "kda_forward", [&]<class T, int kDimK, int kWalkers>() {
        using C = kda::ForwardConfig<T, kDimK, kWalkers>;
        kda::launch_walk<C, kda::kda_forward_kernel<C>>(params, "kda_forward", stream);
    });
}

}  // namespace tfla_tk
