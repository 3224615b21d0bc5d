// Host half of the states at the borders between segments of gated linear attention (GLA): two kernels, the
// sums of the segments (sums.cuh) and their way from border to border (carry.cuh). Equations:
// bindings/params.h.
#include "channel_gate/segments/carry.cuh"
#include "channel_gate/segments/sums.cuh"
#include "common/launch.cuh"

namespace tfla_tk::channel_gate {

template <class C> void launch_segments(const GlaSegmentsParams& p, void* stream) {
    constexpr auto kName = "gla_segments";
    const ChannelShape& s = p.shape;
    const DeviceGuard guard(s.device, kName);
    const SegmentsGlobals g{
        TensorMap(p.keys, s.batch, s.heads, s.seq, s.dim_k, kBlock, s.half),
        TensorMap(p.values, s.batch, s.heads, s.seq, s.dim_v, kBlock, s.half),
        TensorMap::rows(p.g, s.batch, s.heads, s.seq, s.dim_k, kBlock, p.g_dtype),
        p.g_dtype,
        s.cut,
        s.heads,
        s.seq,
        s.dim_k,
        s.dim_v,
        parts_of(s.dim_k, kWalkerColumns) * parts_of(s.dim_v, C::kDimV),
        p.entering,
        p.borders,
        p.decays,
        p.scale,
    };
    const auto ctas = static_cast<std::int64_t>(s.cut.segments) * g.heads * g.ctas;
    launch<gla_sums_kernel<C>, sizeof(SumsMemory<C>)>(g, ctas, C::kThreads, s.device, stream, kName);
    const auto heads = static_cast<std::int64_t>(carrying_ctas(s.cut)) * g.heads;
    const auto blocks = parts_of(s.dim_k * s.dim_v, kCombineThreads * 4);
    launch<gla_carry_kernel<C::kBackward>>(g, grid_of(heads, blocks, kName), kCombineThreads, s.device,
                                           stream, kName);
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

void gla_segments(const GlaSegmentsParams& p, void* stream) {
    using namespace channel_gate;
    with_type(p.shape.half, [&]<class T>() {
        with_tile<64, 128>(p.shape.dim_v <= 64 ? 64 : 128, "gla_segments", [&]<int kDimV>() {
            p.backward ? launch_segments<SumsConfig<T, kDimV, true>>(p, stream)
                       : launch_segments<SumsConfig<T, kDimV, false>>(p, stream);
        });
    });
}

}  // namespace tfla_tk
