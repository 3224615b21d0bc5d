// Arguments of the kernels that make the inputs of the delta rule from raw ones. This header compiles without
// CUDA.
#pragma once

#include "delta_rule/bindings/params.h"

namespace tfla_tk {

// Tokens, of all rows of the batch in a row, of a block for the gates, and of a part of their sums.
constexpr int kInputTokens = 16;

// What the raw inputs are made into:
//   of q and k    y = x r with r = (sum x^2 + 1e-6)^{-1/2}, rounded to their type
//   of beta       sigmoid(beta), times 2 where `twice`
//   of g          -e^{A_log} softplus(g + dt_bias)
// What is not to be made has no data.
struct DeltaInputsParams {
    DeltaShape shape;        // cut and dim_v are not read
    Operand q, k;            // x
    Operand unit_q, unit_k;  // y
    Gate beta, g;
    Gate a_log, dt_bias;          // per head; dt_bias.data is null: zero
    float *strength, *log_decay;  // what beta and g are made into, [batch, seq, heads]
    bool twice;

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, unit_q, unit_k, beta, g, a_log, dt_bias, strength, log_decay, twice);
    }
};

// The gradients of the raw inputs from those of what they are made into:
//   of q and k    dx = r (dy - y (y.dy)), in the place of dy
//   of beta       that of its strength times the slope
//   of g          dg = -e^{A_log} sigmoid(g + dt_bias) times that of the log decay
// For A_log and dt_bias, per head, sums over kInputTokens tokens each: of the log decay times its gradient,
// and of dg.
struct DeltaInputsBackwardParams {
    DeltaShape shape;
    Operand q, k, dq, dk;
    Gate beta, g, a_log, dt_bias;
    const float *d_strength, *d_log_decay;  // [batch, seq, heads]
    Gate d_beta, d_g;                       // written
    float* sums;                            // [2, parts, heads]
    bool twice;

    template <class Visit> void fields(Visit& visit) {
        visit(shape, q, k, dq, dk, beta, g, a_log, dt_bias, d_strength, d_log_decay, d_beta, d_g, sums,
              twice);
    }
};

// Both throw std::runtime_error on a refused launch.
void delta_inputs(const DeltaInputsParams& params, void* stream);
void delta_inputs_backward(const DeltaInputsBackwardParams& params, void* stream);

}  // namespace tfla_tk
