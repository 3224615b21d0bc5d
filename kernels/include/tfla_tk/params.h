// Plain argument structs shared by the kernels' host functions and the pybind11 bindings.
// No CUDA, ThunderKittens or Torch header here: bindings.cpp compiles in seconds.
#pragma once

#include <cstdint>

namespace tfla_tk {

// One [B, H, S, D] operand; strides in elements, unit stride along D.
struct Operand {
    void* data;
    std::int64_t batch_stride, head_stride, row_stride;
};

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// One [B, H, S] vector of gate pre-activations; strides in elements.
struct Gate {
    const void* data;
    std::int64_t batch_stride, head_stride, row_stride;
    DType dtype;
};

struct MlstmFwdParams {
    Operand q, k, v, h;  // bf16 or fp16, all alike
    Gate i, f;
    const float *c_initial, *n_initial,
        *m_initial;                   // [B, H, K, V], [B, H, K], [B, H], contiguous; null: zeros
    float *c_last, *n_last, *m_last;  // the same shapes; null: not wanted
    int batch, heads, seq, dim_qk, dim_v;
    float scale;  // of q k^T
    float eps;    // added to the normaliser after the max
    bool half;    // operands are fp16, not bf16
    bool sigmoid_gate;
    bool normalize;
    int device;
};

// Defined once per instance (head-dim tile and schedule). Throws std::runtime_error on a refused launch.
void mlstm_fwd(const MlstmFwdParams& params, void* stream);

}  // namespace tfla_tk
