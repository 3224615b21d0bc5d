// Arguments of the host function for a few tokens of mLSTM, as the bindings read them.
#pragma once

#include "scalar_gate/bindings/params_decode.h"

namespace tfla_tk {

// A [B, H, S, D] tensor of the tokens with any strides, in elements.
struct TokenRows {
    const void* data;
    std::int64_t batch_stride, head_stride, token_stride, column_stride;
};

// How the warps of a CTA split C. Its slice of V has `warps` times the columns of a warp.
struct SequenceTiling {
    int warps;  // side by side in a row: a power of two
    int width;  // columns that a thread loads and stores at a time: 4 or 8, or 1
};

struct MlstmSequenceParams {
    TokenRows q, k, v;  // D is K, K, V
    DType dtype;        // of q, k, v and h
    Gate i, f;
    StoredState before, after;
    void* h;  // [B, H, S, V], contiguous
    SequenceTiling tiling;
    int batch, heads, tokens, dim_qk, dim_v;
    float scale;  // of q
    float eps;    // added to the normaliser after the max
    bool sigmoid_gate;
    bool normalize;  // else n is copied
    bool in_place;   // `after` is `before`
    int device;
};

// Most tokens of a call, and most columns of V of a slice.
constexpr int kSequenceMaxTokens = 16, kSequenceMaxColumns = 128;

// Defined once per instance (for up to 8 and up to 16 tokens). Throws std::runtime_error on a refused launch,
// std::invalid_argument for what no kernel takes.
void mlstm_sequence(const MlstmSequenceParams& params, void* stream);

}  // namespace tfla_tk
