// Tensors as arguments of the kernels' host functions. This header compiles without CUDA.
//
// fields() of an argument struct gives its members in the order in which Python passes them: to Arguments,
// which reads them, or to Addresses, which finds the addresses in them (launcher.h).
#pragma once

#include <cstdint>

namespace tfla_tk {

// One [B, H, S, D] operand; strides in elements, unit stride along D.
struct Operand {
    void* data;
    std::int64_t batch_stride, head_stride, row_stride;

    template <class Visit> void fields(Visit& visit) { visit(data, batch_stride, head_stride, row_stride); }
    bool operator==(const Operand&) const = default;
};

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// One [B, H, S] vector of gates as they are stored: pre-activations, log decays or beta. Strides in elements.
struct Gate {
    const void* data;
    std::int64_t batch_stride, head_stride, row_stride;
    DType dtype;

    template <class Visit> void fields(Visit& visit) {
        visit(data, batch_stride, head_stride, row_stride, dtype);
    }
};

}  // namespace tfla_tk
