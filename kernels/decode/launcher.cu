// Host half of the decoding kernels.
#include <algorithm>
#include <stdexcept>

#include "common/launch.cuh"
#include "decode/grids.h"
#include "decode/kernel.cuh"
#include "decode/mlstm/launch.cuh"
#include "sequence/family_launcher.h"

namespace tfla_tk::decode {

constexpr const char* kName = "decode";

template <class Run> void with_tile_of(int dim_k, Run run) { with_tile<64, 96, 128, 256>(dim_k, kName, run); }

// The same of KDA, whose decay is per channel and which writes by the delta rule: those of its models.
template <class Run> void with_tile_of_kda(int dim_k, Run run) { with_tile<64, 128>(dim_k, kName, run); }

// Slices of V that a CTA takes, one after the other: more amortise what precedes them, but only where two
// CTAs are left for each multiprocessor. Results do not depend on it.
template <class C> int passes_of(const DecodeParams& p, int slices) {
    const std::int64_t heads = static_cast<std::int64_t>(p.batch) * p.value_heads;
    const std::int64_t wanted = std::int64_t{2} * multiprocessors_of(p.device, kName);
    int passes = 1;
    for (int n = 2; n <= C::kMostPasses; n++)
        if (slices % n == 0 && heads * (slices / n) >= wanted) passes = n;
    return passes;
}

// The call from a batch entry on.
inline DecodeParams from_entry(DecodeParams p, int entry) {
    if (p.offsets != nullptr) {
        const std::int64_t bytes = p.offsets_are_64bit ? 8 : 4;
        p.offsets = static_cast<const char*>(p.offsets) + entry * bytes;
    } else {
        for (Numbers* x : {&p.q, &p.k, &p.v, &p.o, &p.g, &p.beta})
            skip(x->data, entry * x->batch_stride, x->dtype);
    }
    if (p.slots.data != nullptr) {
        p.slots.data += entry * p.slots.stride;
        if (p.slots.accepted != nullptr) p.slots.accepted += entry;
    } else {
        skip(p.before.data, entry * p.before.slot_stride, p.state_dtype);
        skip(p.after.data, entry * p.after.slot_stride, p.state_dtype);
    }
    return p;
}

template <class C> void launch_config(const DecodeParams& p, void* stream) {
    const int slices = p.dim_v / C::kSlice, passes = passes_of<C>(p, slices);
    for (int first = 0; first < p.batch; first += kMostOfGrid) {
        const int entries = std::min(kMostOfGrid, p.batch - first);
        launch<decode_kernel<C>>(Globals{from_entry(p, first), passes},
                                 dim3(slices / passes, p.value_heads, entries), C::kThreads, p.device, stream,
                                 kName);
    }
}

template <Layout kLayout, class State, Decay kDecay, Write kWrite>
void launch_of(const DecodeParams& p, void* stream) {
    auto launch_tile = [&]<int K>() {
        if (p.tokens == 1 && p.offsets == nullptr)
            launch_config<Config<kLayout, State, kDecay, kWrite, K, 1>>(p, stream);
        else
            launch_config<Config<kLayout, State, kDecay, kWrite, K, kDecodeTokens>>(p, stream);
    };
    if constexpr (kDecay == Decay::channel && kWrite == Write::delta)
        with_tile_of_kda(p.dim_k, launch_tile);
    else
        with_tile_of(p.dim_k, launch_tile);
}

// Calls run<State>().
template <class Run> void with_state(DType dtype, Run run) {
    switch (dtype) {
        case DType::bfloat16:
            return run.template operator()<__nv_bfloat16>();
        case DType::float16:
            return run.template operator()<__half>();
        default:
            return run.template operator()<float>();
    }
}

template <Layout kLayout> void launch_layout(const DecodeParams& p, void* stream) {
    with_state(p.state_dtype, [&]<class State>() {
        if (p.by_channel)
            p.delta_rule ? launch_of<kLayout, State, Decay::channel, Write::delta>(p, stream)
                         : launch_of<kLayout, State, Decay::channel, Write::plain>(p, stream);
        else
            p.delta_rule ? launch_of<kLayout, State, Decay::scalar, Write::delta>(p, stream)
                         : launch_of<kLayout, State, Decay::scalar, Write::plain>(p, stream);
    });
}

}  // namespace tfla_tk::decode

namespace tfla_tk {

template <decode::Layout kLayout, int K>
constexpr int columns_of = decode::Part<kLayout, K, kDecodeTokens>::kSlice;

int decode_columns(int dim_k, bool v_first) {
    int columns = 0;
    decode::with_tile_of(dim_k, [&]<int K>() {
        using decode::Layout;
        columns = v_first ? columns_of<Layout::v_first, K> : columns_of<Layout::k_first, K>;
    });
    return columns;
}

void run_decode(const DecodeParams& params, void* stream) {
    if (params.dim_v % decode_columns(params.dim_k, params.v_first) != 0)
        throw std::invalid_argument("decode: no kernel takes so many columns of V");
    const DeviceGuard guard(params.device, decode::kName);
    params.v_first ? decode::launch_layout<decode::Layout::v_first>(params, stream)
                   : decode::launch_layout<decode::Layout::k_first>(params, stream);
}

}  // namespace tfla_tk

const tfla_tk::Launcher* tfla_launcher() {
    using namespace tfla_tk;
    static const Launcher of_tokens{
        {runs<&run_decode>("decode"), tells<&decode_columns>("decode_columns"), runs<&run_mlstm>("mlstm")},
        {{"DECODE_TOKENS", kDecodeTokens},
         {"MAX_KEYS", kMlstmKeys},
         {"MAX_TOKENS", kMlstmTokens},
         {"MAX_SLICES", kMlstmSlices}}};
    static const Launcher launcher = joined({of_tokens});
    return &launcher;
}
