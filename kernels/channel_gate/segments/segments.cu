// Host half of the states at the borders between segments of gated linear attention (GLA): two kernels, the
// sums of the segments (sums.cuh) and their way from border to border (carry.cuh). Equations:
// bindings/params.h.
#include "channel_gate/segments/carry.cuh"
#include "channel_gate/segments/sums.cuh"
#include "common/launch.cuh"

namespace tfla_tk::channel_gate {

template <class C> void launch_segments(const GlaSegmentsParams& p, cudaStream_t stream) {
    constexpr auto kName = "gla_segments";
    const ChannelShape& s = p.shape;
    const DeviceGuard guard(s.device, kName);
    const int columns = (s.dim_k + kWalkerColumns - 1) / kWalkerColumns;
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
        columns * ((s.dim_v + C::kDimV - 1) / C::kDimV),
        p.entering,
        p.borders,
        p.decays,
        p.scale,
    };
    const auto ctas = static_cast<std::int64_t>(s.cut.segments) * g.heads * g.ctas;
    launch<gla_sums_kernel<C>, sizeof(SumsMemory<C>)>(g, grid_of(ctas, 1, kName), C::kThreads, s.device,
                                                      stream, kName);
    const auto heads = static_cast<std::int64_t>(carrying_ctas(s.cut)) * g.heads;
    const int elements = kCombineThreads * 4, blocks = (s.dim_k * s.dim_v + elements - 1) / elements;
    launch<gla_carry_kernel<C::kBackward>>(g, grid_of(heads, blocks, kName), kCombineThreads, s.device,
                                           stream, kName);
}

template <class T, int kDimV> void run_segments(const GlaSegmentsParams& p, cudaStream_t stream) {
    p.backward ? launch_segments<SumsConfig<T, kDimV, true>>(p, stream)
               : launch_segments<SumsConfig<T, kDimV, false>>(p, stream);
}

template <class T> void run_segments(const GlaSegmentsParams& p, cudaStream_t stream) {
    p.shape.dim_v <= 64 ? run_segments<T, 64>(p, stream) : run_segments<T, 128>(p, stream);
}

}  // namespace tfla_tk::channel_gate

namespace tfla_tk {

void gla_segments(const GlaSegmentsParams& params, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    params.shape.half ? channel_gate::run_segments<kittens::half>(params, s)
                      : channel_gate::run_segments<kittens::bf16>(params, s);
}

}  // namespace tfla_tk
