// Host side of KDA's kernels: tensor maps, and the launch of a walk.
#pragma once

#include "common/launch.cuh"
#include "kda/walk.cuh"

namespace tfla_tk::kda {

// Calls run<T, kDimK>() with the operands' type and the tile that holds K.
template <class Run> void with_type_and_tile(const KdaShape& s, const char* name, Run run) {
    with_type(s.half, [&]<class T>() {
        with_tile<64, 128>(tile_of_k(s), name, [&]<int kDimK>() { run.template operator()<T, kDimK>(); });
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

inline TensorMap map_of_values(const KdaShape& s, const Operand& x, int rows) {
    return TensorMap(x, s.batch, s.heads, s.seq, s.dim_v, rows, s.half);
}

// Every chunk as a segment.
inline Cut every_chunk(const KdaShape& s) {
    Cut chunks = s.cut;
    const int slots = slots_of(s);
    chunks.segment_chunks = 1, chunks.segments = s.cut.offsets ? slots : s.cut.sequences * slots;
    return chunks;
}

// Calls run<T, kDimK, kWalkers>().
template <class Run> void with_walk(const KdaWalkParams& p, const char* name, Run run) {
    with_type_and_tile(p.shape, name, [&]<class T, int kDimK>() {
        p.walkers == 1 ? run.template operator()<T, kDimK, 1>() : run.template operator()<T, kDimK, 2>();
    });
}

template <class C, auto kKernel> void launch_walk(const KdaWalkParams& p, const char* name, void* stream) {
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    const KdaShape& s = p.shape;
    const DeviceGuard guard(s.device, name);
    const int slots = slots_of(s);
    const WalkGlobals g{
        map_of_left(s, p.tiles.tiles, slots * kTiles * kChunk, C::kDimK),
        map_of_matrices(s, p.tiles.a),
        map_of_matrices(s, p.tiles.p),
        map_of_values(s, p.values, kChunk),
        ResultMaps::of([&](int rows) { return map_of_values(s, p.results, rows); }),
        p.tiles.factors,
        s.cut,
        p.entering,
        p.leaving,
        static_cast<uint4*>(p.states),
        s.heads,
        s.seq,
        slots,
        groups_of(s),
        s.dim_k,
        s.dim_v,
        parts_of(s.dim_v, kColumns),
    };
    const std::int64_t ctas = static_cast<std::int64_t>(s.cut.segments) * s.heads * g.ctas;
    launch<kKernel, sizeof(WalkMemory<C>)>(g, ctas, C::kThreads, s.device, stream, name);
}

}  // namespace tfla_tk::kda
