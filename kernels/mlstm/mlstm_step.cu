// One token of mLSTM, for decoding. No matrix product, so one instance serves all head dims.
#include <stdexcept>

#include "mlstm_step.cuh"
#include "tfla_tk/launch.cuh"

namespace tfla_tk::mlstm {

// In place the slices of a head are one cluster.
template <class Before, class After, int kWidth>
void launch_step(const MlstmStepParams& p, cudaStream_t stream) {
    constexpr auto kKernel = mlstm_step_kernel<Before, After, kWidth>;
    constexpr int kPortable = 8;  // CTAs of a cluster that every device takes
    const char* name = "mlstm_step";
    const int columns = p.tiling.lanes * kWidth, slices = (p.dim_v + columns - 1) / columns;
    if (p.in_place && slices > kStepMaxSlices) throw std::invalid_argument("mlstm_step: too many slices");
    static std::array<std::atomic<bool>, 64> allowed{};  // by device
    if (p.in_place && slices > kPortable && !allowed.at(p.device)) {
        check_launch(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
        allowed[p.device] = true;
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = p.in_place ? slices : 1;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(slices, p.heads, p.batch);
    config.blockDim = dim3(kStepThreads);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = p.in_place ? 1 : 0;
    check_launch(cudaLaunchKernelEx(&config, kKernel, p), name);
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

// The state keeps its dtype, or changes between fp32 and 16 bits.
template <class Half> void run_half(const MlstmStepParams& p, cudaStream_t stream) {
    if (p.before.c_dtype == p.after.c_dtype)
        run_step<Half, Half>(p, stream);
    else if (p.before.c_dtype == DType::float32)
        run_step<float, Half>(p, stream);
    else if (p.after.c_dtype == DType::float32)
        run_step<Half, float>(p, stream);
    else
        throw std::invalid_argument("mlstm_step: no kernel between two dtypes of 16 bits");
}

}  // namespace tfla_tk::mlstm

namespace tfla_tk {

void mlstm_step(const MlstmStepParams& params, void* stream) {
    const int lanes = params.tiling.lanes;
    if (lanes < 1 || lanes > 32 || (lanes & (lanes - 1)) != 0 || params.dim_qk > kStepMaxKeys)
        throw std::invalid_argument("mlstm_step: no kernel for these lanes or this many keys");
    const DeviceGuard guard(params.device, "mlstm_step");
    const auto s = static_cast<cudaStream_t>(stream);
    if (params.before.c_dtype == DType::bfloat16 || params.after.c_dtype == DType::bfloat16)
        mlstm::run_half<__nv_bfloat16>(params, s);
    else if (params.before.c_dtype == DType::float16 || params.after.c_dtype == DType::float16)
        mlstm::run_half<__half>(params, s);
    else
        mlstm::run_step<float, float>(params, s);
}

}  // namespace tfla_tk
