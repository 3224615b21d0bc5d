// Arguments of the intra-chunk kernel's host function, for its own pybind11 bindings.
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

struct MlstmIntraParams {
    Operand q, k, v, h;  // bf16
    Gate i, f;
    float* workspace;  // [B, H, 4, S rounded up to 128]: the scanned gates
    int batch, heads, seq, dim_qk, dim_v;
    float scale;  // of q k^T
    float eps;    // added to the normaliser after the max
    int device;
};

// Defined once per instance (head-dim tile and schedule). Throws std::runtime_error on a refused launch.
void mlstm_intra(const MlstmIntraParams& params, void* stream);

}  // namespace tfla_tk
