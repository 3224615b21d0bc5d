// Host half of the forward of gated linear attention (GLA): a decay per token, head and key channel. And of
// the mirror walk of its backward, for dV and the gradient of the first state: the forward's walk from the
// last chunk to the first. The gate warps make the same of a chunk, the walkers carry the state's gradient.
// Equations: bindings/params.h, bindings/params_backward.h, block.cuh, docs/gla.md and docs/gla-backward.md.
#include <cmath>
#include <stdexcept>

#include "channel_gate/bindings/params_backward.h"
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

template <class C> void launch_walk(const GlaForwardParams& p, void* stream) {
    constexpr auto kName = C::kBackward ? "gla_mirror" : "gla_forward";
    const ChannelShape& s = p.shape;
    if (p.is_slice && !(C::kTakesSlices && p.part))
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
        parts_of(s.dim_v, kColumns),
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
    launch<gla_walk_kernel<C>, sizeof(ForwardMemory<C>)>(g, ctas, C::kThreads, s.device, stream, kName,
                                                         C::kMakers);
}

// Config: ForwardConfig, or what is derived from it. CTAs take turns where slices of V are even in number.
template <template <class, int, int, int> class Config>
void run_walk(const GlaForwardParams& p, void* stream) {
    constexpr int kSlice = 2 * kWalkerColumns;
    const auto slices = parts_of(p.shape.dim_v, kSlice);
    with_type(p.shape.half, [&]<class T>() {
        with_tile<64, 128>(p.tile_k, "gla_walk", [&]<int kDimK>() {
            if (p.walkers == 1)
                launch_walk<Config<T, kDimK, 1, 1>>(p, stream);
            else if (slices % 2 == 0)
                launch_walk<Config<T, kDimK, 2, 2>>(p, stream);
            else
                launch_walk<Config<T, kDimK, 2, 1>>(p, stream);
        });
    });
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

void gla_forward(const GlaForwardParams& p, void* stream) {
    using namespace channel_gate;
    run_walk<ForwardConfig>(p, stream);
}

void gla_mirror(const GlaForwardParams& p, void* stream) {
    using namespace channel_gate;
    run_walk<MirrorConfig>(p, stream);
}

// Of columns of V that a CTA has beyond those of the call, too.
std::int64_t gla_part_bytes(const ChannelShape& s, int walkers) {
    using namespace channel_gate;
    const std::int64_t places = static_cast<std::int64_t>(part_slots(s)) * s.batch * s.heads;
    const std::size_t of_warp =
        s.half ? sizeof(PartOfWarp<kittens::half>) : sizeof(PartOfWarp<kittens::bf16>);
    return places * parts_of(s.dim_v, walkers * kWalkerColumns) * walkers * 4 * of_warp;
}

}  // namespace tfla_tk
