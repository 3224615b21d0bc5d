// Arguments of mLSTM's decoding kernels. This header compiles without CUDA.
#pragma once

#include "common/operand.h"

namespace tfla_tk {

// Tokens [B, H, T, D] with any strides, in elements.
struct MlstmRows {
    const void* data;
    std::int64_t batch_stride, head_stride, token_stride, column_stride;

    template <class Visit> void fields(Visit& visit) {
        visit(data, batch_stride, head_stride, token_stride, column_stride);
    }
};

// The state of every head: [B, H, K, V], [B, H, K], [B, H], each contiguous. m is null with the sigmoid gate.
struct MlstmState {
    void *c, *n, *m;
    DType c_dtype, n_dtype, m_dtype;

    template <class Visit> void fields(Visit& visit) { visit(c, n, m, c_dtype, n_dtype, m_dtype); }
};

// How a CTA shares its slice of C.
struct MlstmTiling {
    int across;  // threads side by side in a row with one token, warps with several: a power of two
    int width;   // columns that a thread moves at a time: the one width of the kernels for these dtypes, or 1

    template <class Visit> void fields(Visit& visit) { visit(across, width); }
};

// The largest K, the most tokens of a call, and the most slices of V of a head in place.
constexpr int kMlstmKeys = 256, kMlstmTokens = 16, kMlstmSlices = 16;

// A few tokens of mLSTM. Per token and head, with m of the exponential gate alone:
//
//     C <- decay C + write k v^T      n <- decay n + write k      h = scale C^T q / normaliser
//
// NOTES: the state is read once, written once, and rounded once.
struct MlstmParams {
    MlstmRows q, k, v;
    DType dtype;  // of q, k, v and h
    Gate i, f;
    MlstmState before, after;
    void* h;  // [B, H, T, V], contiguous
    MlstmTiling tiling;
    int batch, heads, tokens, dim_k, dim_v;
    float scale;  // of q
    float eps;    // added to the normaliser after the maximum
    bool sigmoid_gate;
    bool normalize;  // else n is copied
    bool in_place;   // `after` is `before`
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q, k, v, dtype, i, f, before, after, h, tiling, batch, heads, tokens, dim_k, dim_v, scale, eps,
              sigmoid_gate, normalize, in_place, device);
    }
};

// Throws std::runtime_error on a refused launch, std::invalid_argument for what no kernel takes.
void run_mlstm(const MlstmParams& params, void* stream);

}  // namespace tfla_tk
