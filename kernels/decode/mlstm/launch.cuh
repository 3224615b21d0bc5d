// Host half of mLSTM's decoding kernels, for one token and for several.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "common/launch.cuh"
#include "decode/grids.h"
#include "decode/mlstm/sequence.cuh"
#include "decode/mlstm/step.cuh"

namespace tfla_tk::decode {

constexpr const char* kMlstmName = "mlstm";

// The call from a head of a batch entry on.
inline MlstmParams from_head(MlstmParams p, std::int64_t batch, std::int64_t head) {
    const std::int64_t index = batch * p.heads + head, keys = index * p.dim_k;
    for (MlstmRows* x : {&p.q, &p.k, &p.v})
        skip(x->data, batch * x->batch_stride + head * x->head_stride, p.dtype);
    for (Gate* x : {&p.i, &p.f}) skip(x->data, batch * x->batch_stride + head * x->head_stride, x->dtype);
    for (MlstmState* x : {&p.before, &p.after}) {
        skip(x->c, keys * p.dim_v, x->c_dtype), skip(x->n, keys, x->n_dtype);
        skip(x->m, index, x->m_dtype);
    }
    skip(p.h, index * p.tokens * p.dim_v, p.dtype);
    return p;
}

// One CTA per slice of every head, with so many columns; in place the slices of a head form a cluster.
template <auto kKernel> void launch_slices(const MlstmParams& p, int columns, int threads, void* stream) {
    const int slices = parts_of(p.dim_v, columns);
    if (p.in_place && slices > kMlstmSlices) throw std::invalid_argument("mlstm: too many slices");
    const int batches = p.heads > kMostOfGrid ? 1 : kMostOfGrid;  // heads of one entry alone are cut
    for (int batch = 0; batch < p.batch; batch += batches)
        for (int head = 0; head < p.heads; head += kMostOfGrid) {
            MlstmParams part = from_head(p, batch, head);
            part.batch = std::min(batches, p.batch - batch);
            part.heads = std::min(kMostOfGrid, p.heads - head);
            launch<kKernel>(part, dim3(slices, part.heads, part.batch), threads, p.device, stream, kMlstmName,
                            p.in_place ? slices : 1);
        }
}

// Calls run<width>() with the width of a call: as many columns as the kernels take at once, or 1.
template <int kWidest, class Run> void with_width(int width, Run run) {
    if (width == kWidest)
        run.template operator()<kWidest>();
    else if (width == 1)
        run.template operator()<1>();
    else
        throw std::invalid_argument("mlstm: no kernel for this width");
}

template <class Before, class After> void launch_step(const MlstmParams& p, void* stream) {
    if (p.tiling.across > kStepLanes) throw std::invalid_argument("mlstm: no kernel for so many lanes");
    constexpr int kWidest = 16 / std::max(sizeof(Before), sizeof(After));
    with_width<kWidest>(p.tiling.width, [&]<int kWidth>() {
        launch_slices<mlstm_step_kernel<Before, After, kWidth>>(p, p.tiling.across * kWidth, kStepThreads,
                                                                stream);
    });
}

template <class Before, class After, int kTokens, bool kTokensFp32>
void launch_sequence(const MlstmParams& p, void* stream) {
    using Vectors = SequenceConfig<Before, After, kTokens, kTokensFp32, true>;
    with_width<Vectors::kWidth>(p.tiling.width, [&]<int kWidth>() {
        using C = SequenceConfig<Before, After, kTokens, kTokensFp32, kWidth != 1>;
        const int columns = p.tiling.across * C::kWarpColumns;
        if (columns > kSequenceColumns) throw std::invalid_argument("mlstm: no kernel for so many warps");
        launch_slices<mlstm_sequence_kernel<C>>(p, columns, kSequenceThreads, stream);
    });
}

template <class Before, class After> void launch_tokens(const MlstmParams& p, void* stream) {
    if (p.tokens == 1) return launch_step<Before, After>(p, stream);
    with_tile<8, kMlstmTokens>(p.tokens <= 8 ? 8 : kMlstmTokens, kMlstmName, [&]<int kTokens>() {
        p.dtype == DType::float32 ? launch_sequence<Before, After, kTokens, true>(p, stream)
                                  : launch_sequence<Before, After, kTokens, false>(p, stream);
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
    const int across = params.tiling.across, tokens = params.tokens;
    if (across < 1 || (across & (across - 1)) != 0 || tokens < 1 || tokens > kMlstmTokens ||
        params.dim_k > kMlstmKeys)
        throw std::invalid_argument("mlstm: no kernel for this sharing of C, or this many tokens or keys");
    const DeviceGuard guard(params.device, decode::kMlstmName);
    decode::with_states(params.before.c_dtype, params.after.c_dtype, [&]<class Before, class After>() {
        decode::launch_tokens<Before, After>(params, stream);
    });
}

}  // namespace tfla_tk
