// Host half of a few tokens of mLSTM, for decoding, for all head dims.
#include <stdexcept>

#include "scalar_gate/decode/sequence.cuh"

namespace tfla_tk::mlstm {

constexpr const char* kSequenceName = "mlstm_sequence";

void move_rows(MlstmSequenceParams& p, std::int64_t batch, std::int64_t head, std::int64_t index) {
    for (TokenRows* x : {&p.q, &p.k, &p.v})
        move(x->data, (batch * x->batch_stride + head * x->head_stride) * bytes_of(p.dtype));
    move(p.h, index * p.tokens * p.dim_v * bytes_of(p.dtype));
}

template <class C> void launch_sequence(const MlstmSequenceParams& p, cudaStream_t stream) {
    const int columns = p.tiling.warps * C::kWarpColumns;
    if (columns > kSequenceMaxColumns)
        throw std::invalid_argument("mlstm_sequence: no kernel for this many warps side by side");
    launch_slices<mlstm_sequence_kernel<C>>(p, (p.dim_v + columns - 1) / columns, kSequenceThreads, stream,
                                            kSequenceName, move_rows);
}

template <class Before, class After, int kTokens, bool kTokensFp32>
void run_sequence(const MlstmSequenceParams& p, cudaStream_t stream) {
    using Vectors = SequenceConfig<Before, After, kTokens, kTokensFp32, true>;
    if (p.tiling.width == Vectors::kWidth)
        launch_sequence<Vectors>(p, stream);
    else if (p.tiling.width == 1)
        launch_sequence<SequenceConfig<Before, After, kTokens, kTokensFp32, false>>(p, stream);
    else
        throw std::invalid_argument("mlstm_sequence: no kernel for this width");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_sequence(const MlstmSequenceParams& params, void* stream) {
    const int warps = params.tiling.warps, tokens = params.tokens;
    if (warps < 1 || (warps & (warps - 1)) != 0 || tokens < 1 || tokens > kSequenceMaxTokens ||
        params.dim_qk > kDecodeMaxKeys)
        throw std::invalid_argument("mlstm_sequence: no kernel for these warps or this many tokens or keys");
    const DeviceGuard guard(params.device, mlstm::kSequenceName);
    const auto s = static_cast<cudaStream_t>(stream);
    mlstm::with_state_types(
        params.before.c_dtype, params.after.c_dtype, mlstm::kSequenceName, [&]<class Before, class After>() {
            auto run = [&]<int kTokens>() {
                params.dtype == DType::float32
                    ? mlstm::run_sequence<Before, After, kTokens, true>(params, s)
                    : mlstm::run_sequence<Before, After, kTokens, false>(params, s);
            };
            with_tile<8, kSequenceMaxTokens>(tokens <= 8 ? 8 : kSequenceMaxTokens, mlstm::kSequenceName, run);
        });
}

}  // namespace tfla_tk
