// The launch of the forward's walk, and of its mirror.
#pragma once

#include <cmath>
#include <stdexcept>

#include "channel_gate/forward/kernel.cuh"
#include "common/launch.cuh"

namespace tfla_tk::channel_gate {

// s as a power of two, for operands and scores, times a number from 1 to 2, for O. So q is exact as an
// operand where nothing decays.
struct SplitScale {
    float of_operands, of_out = 1.f;
    explicit SplitScale(float s) : of_operands(s) {
        int exponent;
        const float digits = 2.f * std::frexp(s, &exponent);
        if (s == 0.f || !std::isfinite(s)) return;
        of_operands = std::ldexp(1.f, exponent - 1), of_out = digits;
    }
};

inline int part_slots(const ChannelShape& s) {
    return chunk_slots(s.seq, s.cut.sequences, s.cut.offsets != nullptr);
}

// Of the parts of O that launches leave. Of columns of V that a CTA has beyond those of the call, too.
inline std::int64_t part_bytes(const ChannelShape& s, int walkers) {
    const std::int64_t places = static_cast<std::int64_t>(part_slots(s)) * s.batch * s.heads;
    const int columns = walkers * kWalkerColumns, ctas = (s.dim_v + columns - 1) / columns;
    const std::size_t of_warp =
        s.half ? sizeof(PartOfWarp<kittens::half>) : sizeof(PartOfWarp<kittens::bf16>);
    return places * ctas * walkers * 4 * of_warp;
}

template <class C> void launch_walk(const GlaForwardParams& p, cudaStream_t stream) {
    constexpr auto kName = C::kBackward ? "gla_mirror" : "gla_forward";
    const ChannelShape& s = p.shape;
    if (!(p.is_first && p.is_last) && !(C::kTakesSlices && p.part))
        throw std::runtime_error(std::string(kName) +
                                 ": a slice of K of another instance, or without a part");
    const DeviceGuard guard(s.device, kName);
    auto map = [&](const Operand& x, int dim, int box_rows) {
        return TensorMap(x, s.batch, s.heads, s.seq, dim, box_rows, s.half);
    };
    const int gate_rows = p.g_dtype == DType::float32 ? kChunk : kBlock;
    constexpr int kColumns = C::kWalkers * kWalkerColumns;
    SplitScale scale(p.scale);
    if (C::kBackward) scale.of_operands = p.scale;
    const ForwardGlobals g{
        map(p.q, s.dim_k, kChunk),
        map(p.k, s.dim_k, kChunk),
        map(p.v, s.dim_v, kChunk),
        {TensorMap::rows(p.g, s.batch, s.heads, s.seq, s.dim_k, gate_rows, p.g_dtype), p.g_dtype},
        ResultMaps::of([&](int rows) { return map(p.o, s.dim_v, rows); }),
        s.cut,
        s.heads,
        s.seq,
        s.dim_k,
        s.dim_v,
        (s.dim_v + kColumns - 1) / kColumns,
        scale.of_operands,
        scale.of_out,
        p.initial,
        p.last,
        p.other_dim_k,
        p.borders,
        p.part,
        part_slots(s),
        !p.is_first,
        !p.is_last,
    };
    const auto ctas = static_cast<std::int64_t>(s.cut.segments) * g.heads * g.ctas;
    launch<gla_walk_kernel<C>, sizeof(ForwardMemory<C>)>(g, grid_of(ctas, 1, kName), C::kThreads, s.device,
                                                         stream, kName, C::kMakers);
}

// Config: ForwardConfig, or what is derived from it. CTAs take turns where slices of V are even in number.
template <template <class, int, int, int> class Config>
void run_walk(const GlaForwardParams& p, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    constexpr int kSlice = 2 * kWalkerColumns;
    const int slices = (p.shape.dim_v + kSlice - 1) / kSlice;
    auto run = [&]<class T, int kDimK>() {
        if (p.walkers == 1)
            launch_walk<Config<T, kDimK, 1, 1>>(p, s);
        else if (slices % 2 == 0)
            launch_walk<Config<T, kDimK, 2, 2>>(p, s);
        else
            launch_walk<Config<T, kDimK, 2, 1>>(p, s);
    };
    with_tile<64, 128>(p.tile_k, "gla_walk", [&]<int kDimK>() {
        p.shape.half ? run.template operator()<kittens::half, kDimK>()
                     : run.template operator()<kittens::bf16, kDimK>();
    });
}

}  // namespace tfla_tk::channel_gate
