// What the arguments of the kernels of decoding share.
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// The state of every head: [B, H, K, V], [B, H, K], [B, H], each contiguous and in a dtype of its own. m is
// null with the sigmoid gate.
struct StoredState {
    void *c, *n, *m;
    DType c_dtype, n_dtype, m_dtype;
};

// Columns of K that they take, and slices of V of a head that they take in place.
constexpr int kDecodeMaxKeys = 256, kDecodeMaxSlices = 16;

}  // namespace tfla_tk
