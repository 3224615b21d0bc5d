// Host half of mLSTM's decoding kernels.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "common/launch.cuh"
#include "decode/mlstm/kernel.cuh"

namespace tfla_tk::decode {

constexpr const char* kMlstmName = "mlstm";

// One CTA per slice of every head; in place the slices of a head form a cluster. A grid holds 65,535 heads
// and batch entries; more take several launches.
template <class C> void launch_mlstm(const MlstmParams& p, cudaStream_t stream) {
    constexpr int kMost = 65535;
    const int columns = p.lanes * C::kWidth, slices = (p.dim_v + columns - 1) / columns;
    if (p.in_place && slices > kMlstmSlices) throw std::invalid_argument("mlstm: too many slices");
    for (int batch = 0; batch < p.batch; batch += kMost)
        for (int head = 0; head < p.heads; head += kMost) {
            const dim3 grid(slices, std::min(kMost, p.heads - head), std::min(kMost, p.batch - batch));
            launch<mlstm_kernel<C>>(MlstmGlobals{p, batch, head}, grid, kMlstmThreads, p.device, stream,
                                    kMlstmName, p.in_place ? slices : 1);
        }
}

template <class Before, class After> void launch_mlstm_of(const MlstmParams& p, cudaStream_t stream) {
    const int tile = p.tokens == 1 ? 1 : p.tokens <= 8 ? 8 : kMlstmTokens;
    with_tile<1, 8, kMlstmTokens>(tile, kMlstmName, [&]<int kTokens>() {
        using Vectors = MlstmConfig<Before, After, kTokens, true>;
        if (p.width == Vectors::kWidth)
            launch_mlstm<Vectors>(p, stream);
        else if (p.width == 1)
            launch_mlstm<MlstmConfig<Before, After, kTokens, false>>(p, stream);
        else
            throw std::invalid_argument("mlstm: no kernel for this width");
    });
}

// Calls run<Before, After>() with the types of C before and after: equal, or fp32 and 16 bits.
template <class Run> void with_states(DType before, DType after, Run run) {
    const auto with_half = [&]<class Half>(Half) {
        if (before == after)
            run.template operator()<Half, Half>();
        else if (before == DType::float32)
            run.template operator()<float, Half>();
        else if (after == DType::float32)
            run.template operator()<Half, float>();
        else
            throw std::invalid_argument("mlstm: no kernel between two dtypes of 16 bits");
    };
    if (before == DType::bfloat16 || after == DType::bfloat16)
        with_half(__nv_bfloat16{});
    else if (before == DType::float16 || after == DType::float16)
        with_half(__half{});
    else
        run.template operator()<float, float>();
}

}  // namespace tfla_tk::decode

namespace tfla_tk {

void run_mlstm(const MlstmParams& params, void* stream) {
    const int lanes = params.lanes, tokens = params.tokens;
    if (lanes < decode::kMlstmLeastLanes || lanes > decode::kMlstmLanes || (lanes & (lanes - 1)) != 0 ||
        tokens < 1 || tokens > kMlstmTokens || params.dim_k > kMlstmKeys)
        throw std::invalid_argument("mlstm: no kernel for these lanes or this many tokens or keys");
    const DeviceGuard guard(params.device, decode::kMlstmName);
    decode::with_states(params.before.c_dtype, params.after.c_dtype, [&]<class Before, class After>() {
        decode::launch_mlstm_of<Before, After>(params, static_cast<cudaStream_t>(stream));
    });
}

}  // namespace tfla_tk
