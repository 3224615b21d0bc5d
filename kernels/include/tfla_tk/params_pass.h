// Arguments of a pass of the mLSTM backward, for its own pybind11 bindings.
#pragma once

#include "tfla_tk/params.h"

namespace tfla_tk {

// The gradient that a pass makes, and what it walks over; s K^-1/2, W the gates, w the normaliser, e as in
// params_bwd.h.
//   dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j     queries dh, keys v,  values k, forward in time
//   dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t     queries v,  keys dh, values q, backward in time
//   dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t           queries k,  keys q,  values dh, backward in
//   time
enum class Gradient : int { dq = 0, dk = 1, dv = 2 };

struct MlstmPassParams {
    Gradient gradient;
    Operand queries, keys, values, out;  // [B, H, S, *], bf16 or fp16; out as values
    Operand factor;                      // like out: rows of the sums; dq and dk only
    Gate i, f;
    const float *log2_w, *e;               // [B, H, S]
    const double* chunk_m;                 // [B, H, slots] of chunk_slots; null with the sigmoid gate
    const float *entering_c, *entering_n;  // what the walk begins with: [N, H, K, V] and [N, H, K], or null
    float *leaving_c, *leaving_n;          // gradients of the initial state, or null
    float *whole, *inter;                  // [panels, B, H, S] row sums of out . factor; null for dv
    // dq leaves its state before every chunk of a multiple of kAnchorChunks, for dk of the same tile to
    // multiply with: the flow of gradient over that boundary. pass_anchor_bytes of it; null for dv.
    void* states;
    float* flows;  // [B, H, anchor_slots, flow_parts], dk only: this call writes pass_flow_parts of them
    int flow_parts;
    const void* offsets;  // of packed sequences, as in Cut
    bool wide_offsets;
    int sequences;
    int batch, heads, seq, dim_keys, dim_values;
    float scale;  // of q k^T
    bool half;    // operands are fp16, not bf16
    bool sigmoid_gate;
    int device;
};

// Columns of `out` that one entry of the row sums adds up.
constexpr int kSumColumns = 64;

// Bytes of `states`, and the parts of a flow that a call writes.
std::int64_t pass_anchor_bytes(int batch, int heads, int slots, int dim_values);
int pass_flow_parts(int dim_values);

// Defined once per instance (tile). Throws std::runtime_error on a refused launch.
void mlstm_pass(const MlstmPassParams& params, void* stream);

}  // namespace tfla_tk
