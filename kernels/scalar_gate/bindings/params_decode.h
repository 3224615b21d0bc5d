// Arguments that the decoding kernels have in common.
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// The state of every head: [B, H, K, V], [B, H, K], [B, H], each contiguous and with its own dtype. m is null
// with the sigmoid gate.
struct StoredState {
    void *c, *n, *m;
    DType c_dtype, n_dtype, m_dtype;
};

// Largest K, and most slices of V of a head in an in-place call.
constexpr int kDecodeMaxKeys = 256, kDecodeMaxSlices = 16;

}  // namespace tfla_tk
