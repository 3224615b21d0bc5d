// Arguments of the mLSTM step's host function, as the bindings read them.
#pragma once

#include "scalar_gate/bindings/params_decode.h"

namespace tfla_tk {

// A [B, H, D] tensor of one token with any strides: the struct Gate with D in place of tokens.
using TokenRow = Gate;

// How the threads of a CTA split C. Its slice of V has lanes * width columns.
struct StepTiling {
    int lanes;  // threads side by side in a row: a power of two up to 32
    int width;  // columns per thread: as many as 16 bytes hold of the wider state dtype, or 1
};

struct MlstmStepParams {
    TokenRow q, k, v;  // D is K, K, V
    TokenRow i, f;     // D is 1
    StoredState before, after;
    void* h;  // [B, H, V], contiguous
    DType h_dtype;
    StepTiling tiling;
    int batch, heads, dim_qk, dim_v;
    float scale;  // of q
    float eps;    // added to the normaliser after the max
    bool sigmoid_gate;
    bool normalize;  // else n is copied
    bool in_place;   // `after` is `before`
    int device;
};

// Throws std::runtime_error on a refused launch, std::invalid_argument for what no kernel takes.
void mlstm_step(const MlstmStepParams& params, void* stream);

}  // namespace tfla_tk
