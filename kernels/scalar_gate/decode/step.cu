// Host half of one token of mLSTM, for decoding, for all head dims.
#include <stdexcept>

#include "scalar_gate/decode/step.cuh"

namespace tfla_tk::mlstm {

constexpr const char* kStepName = "mlstm_step";

void move_tokens(MlstmStepParams& p, std::int64_t batch, std::int64_t head, std::int64_t index) {
    for (TokenRow* x : {&p.q, &p.k, &p.v}) move(*x, batch, head);
    move(p.h, index * p.dim_v * bytes_of(p.h_dtype));
}

template <class Before, class After, int kWidth>
void launch_step(const MlstmStepParams& p, cudaStream_t stream) {
    const int columns = p.tiling.lanes * kWidth;
    launch_slices<mlstm_step_kernel<Before, After, kWidth>>(p, (p.dim_v + columns - 1) / columns,
                                                            kStepThreads, stream, kStepName, move_tokens);
}

template <class Before, class After> void run_step(const MlstmStepParams& p, cudaStream_t stream) {
    constexpr int kWidth = 16 / (sizeof(Before) > sizeof(After) ? sizeof(Before) : sizeof(After));
    if (p.tiling.width == kWidth)
        launch_step<Before, After, kWidth>(p, stream);
    else if (p.tiling.width == 1)
        launch_step<Before, After, 1>(p, stream);
    else
        throw std::invalid_argument("mlstm_step: no kernel for this width");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_step(const MlstmStepParams& params, void* stream) {
    const int lanes = params.tiling.lanes;
    if (lanes < 1 || lanes > 32 || (lanes & (lanes - 1)) != 0 || params.dim_qk > kDecodeMaxKeys)
        throw std::invalid_argument("mlstm_step: no kernel for these lanes or this many keys");
    const DeviceGuard guard(params.device, mlstm::kStepName);
    mlstm::with_state_types(params.before.c_dtype, params.after.c_dtype, mlstm::kStepName,
                            [&]<class Before, class After>() {
                                mlstm::run_step<Before, After>(params, static_cast<cudaStream_t>(stream));
                            });
}

}  // namespace tfla_tk
