// Host half of the gradients of q, k and the log gates of gated linear attention (GLA): two walks
// (kernel.cuh).
#include <stdexcept>

#include "channel_gate/backward/states/kernel.cuh"
#include "common/launch.cuh"

namespace tfla_tk::channel_gate {

inline int slots_of(const ChannelShape& s) {
    return chunk_slots(s.seq, s.cut.sequences, s.cut.offsets != nullptr);
}

template <class C> StatesGlobals states_globals(const GlaStatesParams& p) {
    constexpr int kColumns = C::kStrips * kWalkerColumns;
    const ChannelShape& s = p.shape;
    auto boxes = [&](const Operand& x, int dim, int rows) {
        return TensorMap(x, s.batch, s.heads, s.seq, dim, rows, s.half);
    };
    auto rows = [&](const Operand& x, DType dtype, int count) {
        return TensorMap::rows(x, s.batch, s.heads, s.seq, s.dim_k, count, dtype);
    };
    auto maps = [&](const Operand& x, DType dtype) {
        // NOTES: where there is none, of the gates: a map has to be of some tensor
        const Operand& of = p.needs_dg && x.data ? x : p.g;
        const DType type = p.needs_dg && x.data ? dtype : p.g_dtype;
        return BlockMaps{rows(of, type, kBlock), rows(of, type, 1)};
    };
    return {
        boxes(C::kIsLeft ? p.q : p.k, s.dim_k, kBlock),
        boxes(C::kIsLeft ? p.k : p.q, s.dim_k, kBlock),
        boxes(C::kIsLeft ? p.dout : p.v, s.dim_v, kBlock),
        boxes(C::kIsLeft ? p.v : p.dout, s.dim_v, kBlock),
        rows(p.g, p.g_dtype, kBlock),
        p.g_dtype,
        {boxes(p.result, s.dim_k, kBlock), boxes(p.result, s.dim_k, 1)},
        maps(p.inflow, DType::float32),
        maps(p.dg, p.g_dtype),
        s.cut,
        s.heads,
        s.seq,
        s.dim_k,
        s.dim_v,
        parts_of(s.dim_k, kColumns),
        anchor_slots(slots_of(s)),
        slots_of(s) * kBlocks,
        p.entering,
        p.d_last,
        p.borders,
        p.d_borders,
        p.flows,
        static_cast<uint4*>(p.anchors),
        p.scale,
        p.needs_dg,
        s.dim_v + p.other_dim_v,
        p.sums,
        p.is_first,
        p.is_last,
    };
}

template <class C> void launch_states(const GlaStatesParams& p, void* stream) {
    constexpr auto kName = C::kIsLeft ? "gla_left" : "gla_right";
    if (p.shape.dim_v > C::kDimV)
        throw std::runtime_error(std::string(kName) + ": V is larger than the tile");
    if (p.is_slice && !(C::kTakesSlices && p.sums))
        throw std::runtime_error(std::string(kName) + ": slices of V want a tile of 256 and sums");
    const DeviceGuard guard(p.shape.device, kName);
    const StatesGlobals g = states_globals<C>(p);
    const auto ctas = static_cast<std::int64_t>(g.cut.segments) * g.heads * g.ctas;
    launch<gla_states_kernel<C>, sizeof(StatesMemory<C>)>(g, ctas, C::kThreads, p.shape.device, stream,
                                                          kName);
}

template <StateWalk kWalk> void run_states(const GlaStatesParams& p, void* stream) {
    with_type(p.shape.half, [&]<class T>() {
        with_tile<64, 128, 256>(p.tile_v, "gla_states", [&]<int kDimV>() {
            if constexpr (kDimV <= 128)
                if (p.walkers == 1) return launch_states<StatesConfig<T, kDimV, 1, kWalk>>(p, stream);
            launch_states<StatesConfig<T, kDimV, 2, kWalk>>(p, stream);
        });
    });
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

std::int64_t gla_anchor_bytes(const ChannelShape& s, int tile_v) {
    const std::int64_t anchors = anchor_slots(channel_gate::slots_of(s));
    const std::int64_t bytes_of_part = tile_v / 16 * channel_gate::kAnchorUnits * sizeof(uint4);
    const std::int64_t parts = (s.dim_k + 15) / 16;
    return anchors * s.batch * s.heads * parts * bytes_of_part;
}

std::int64_t gla_sums_bytes(const ChannelShape& s) {
    using namespace channel_gate;
    const std::int64_t blocks = slots_of(s) * kBlocks;
    return blocks * s.batch * s.heads * parts_of(s.dim_k, kWalkerColumns) * sizeof(SumsOfBlock);
}

void gla_left(const GlaStatesParams& params, void* stream) {
    channel_gate::run_states<channel_gate::StateWalk::left>(params, stream);
}

void gla_right(const GlaStatesParams& params, void* stream) {
    channel_gate::run_states<channel_gate::StateWalk::right>(params, stream);
}

}  // namespace tfla_tk
