// Host half of KDA's forward: two kernels.
//   kda_matrices  of every chunk and head, in parallel: the matrices A and P, and all that the walk needs of
//   q,
//                 k, g and beta (matrices/kernel.cuh)
//   kda_forward   the walk over the chunks (forward/kernel.cuh)
// Equations: bindings/params.h.
#include "common/launch.cuh"
#include "kda/forward/kernel.cuh"
#include "kda/matrices/kernel.cuh"

namespace tfla_tk::kda {

// Calls run<T, kDimK>() with the operands' type and the tile that holds K.
template <class Run> void with_type_and_tile(const KdaShape& s, const char* name, Run run) {
    with_tile<64, 128>(tile_of_k(s), name, [&]<int kDimK>() {
        s.half ? run.template operator()<kittens::half, kDimK>()
               : run.template operator()<kittens::bf16, kDimK>();
    });
}

inline TensorMap map_of_keys(const KdaShape& s, const Operand& x) {
    return TensorMap(x, s.batch, s.heads / s.group, s.seq, s.dim_k, kChunk, s.half);
}
// [batch * heads, rows, columns]
inline TensorMap map_of_left(const KdaShape& s, void* data, int rows, int columns) {
    const std::int64_t head_stride = static_cast<std::int64_t>(rows) * columns;
    const int heads = s.batch * s.heads;
    return TensorMap(Operand{data, head_stride * heads, head_stride, columns}, 1, heads, rows, columns,
                     kChunk, s.half);
}
inline TensorMap map_of_matrices(const KdaShape& s, void* data) {
    return map_of_left(s, data, slots_of(s) * kChunk, kChunk);
}

template <class T, int kDimK> void launch_matrices(const KdaMatricesParams& p, cudaStream_t stream) {
    constexpr const char* kName = "kda_matrices";
    const KdaShape& s = p.shape;
    const DeviceGuard guard(s.device, kName);
    const int slots = slots_of(s);
    Cut chunks = s.cut;  // every chunk is a segment
    chunks.segment_chunks = 1, chunks.segments = s.cut.offsets ? slots : s.cut.sequences * slots;
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
    launch<kda_matrices_kernel<T, kDimK>, sizeof(Memory)>(g, grid_of(ctas, 1, kName), kMatricesThreads,
                                                          s.device, stream, kName);
}

template <class C> void launch_forward(const KdaForwardParams& p, cudaStream_t stream) {
    constexpr const char* kName = "kda_forward";
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const KdaShape& s = p.shape;
    const DeviceGuard guard(s.device, kName);
    auto of_values = [&](const Operand& x, int rows) {
        return TensorMap(x, s.batch, s.heads, s.seq, s.dim_v, rows, s.half);
    };
    const int slots = slots_of(s);
    const ForwardGlobals g{
        map_of_left(s, p.tiles.tiles, slots * kTiles * kChunk, C::kDimK),
        map_of_matrices(s, p.tiles.a),
        map_of_matrices(s, p.tiles.p),
        of_values(p.v, kChunk),
        ResultMaps::of([&](int rows) { return of_values(p.o, rows); }),
        p.tiles.factors,
        s.cut,
        p.initial,
        p.last,
        p.v_first,
        s.heads,
        s.seq,
        slots,
        s.dim_k,
        s.dim_v,
        (s.dim_v + kColumns - 1) / kColumns,
    };
    const std::int64_t ctas = static_cast<std::int64_t>(s.cut.segments) * s.heads * g.ctas;
    launch<kda_forward_kernel<C>, sizeof(ForwardMemory<C>)>(g, grid_of(ctas, 1, kName), C::kThreads, s.device,
                                                            stream, kName);
}

}  // namespace tfla_tk::kda

namespace tfla_tk {

KdaTilesBytes kda_tiles_bytes(const KdaShape& shape) {
    const std::int64_t chunks = static_cast<std::int64_t>(shape.batch) * shape.heads * kda::slots_of(shape);
    const int tile = kda::tile_of_k(shape);
    const std::size_t factors = tile == 64 ? sizeof(kda::Factors<64>) : sizeof(kda::Factors<128>);
    return {chunks * kda::kTiles * kChunk * tile * 2, chunks * static_cast<std::int64_t>(factors),
            chunks * kChunk * kChunk * 2};
}

void kda_matrices(const KdaMatricesParams& params, void* stream) {
    kda::with_type_and_tile(params.shape, "kda_matrices", [&]<class T, int kDimK>() {
        kda::launch_matrices<T, kDimK>(params, static_cast<cudaStream_t>(stream));
    });
}

void kda_forward(const KdaForwardParams& params, void* stream) {
    kda::with_type_and_tile(params.shape, "kda_forward", [&]<class T, int kDimK>() {
        const auto s = static_cast<cudaStream_t>(stream);
        if (params.walkers == 1)
            kda::launch_forward<kda::ForwardConfig<T, kDimK, 1>>(params, s);
        else
            kda::launch_forward<kda::ForwardConfig<T, kDimK, 2>>(params, s);
    });
}

}  // namespace tfla_tk
