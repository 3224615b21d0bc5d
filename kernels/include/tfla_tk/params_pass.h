// Arguments of a pass of the mLSTM backward, for its own pybind11 bindings.
#pragma once

#include "tfla_tk/params.h"

namespace tfla_tk {

// The gradient that a pass makes, and what it walks over; s K^-1/2, W the gates, w the normaliser, e as in
// params_bwd.h.
//   dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j   queries dh, keys v,  values k,  forward in time
//   dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t   queries v,  keys dh, values q,  backward
//   dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t         queries k,  keys q,  values dh, backward
enum class Gradient : int { dq = 0, dk = 1, dv = 2 };

// What a pass and its segments kernel have in common.
struct PassWalk {
    Gradient gradient;
    Operand keys, values;  // [B, H, S, *], bf16 or fp16
    Gate i, f;
    const float *log2_w, *e;  // [B, H, S]; null without normaliser: both are 0
    const double* chunk_m;    // [B, H, slots] of chunk_slots; null with the sigmoid gate
    // c: from the first of the keys' columns on; null where no sequence is cut. n null: zero
    Boundaries boundaries;
    Cut cut;
    int batch, heads, seq, dim_keys, dim_values;
    int state_columns;  // from one row of a state [K, V] to the next, all states alike
    float scale;        // of q k^T
    bool half;          // operands are fp16, not bf16
    bool sigmoid_gate;
    int device;
};

struct MlstmPassParams {
    PassWalk walk;
    Operand queries, out;  // as keys, as values
    Operand factor;        // like out: rows of the sums
    // What a sequence's walk begins with, [N, H, K, V] and [N, H, K], and the gradients of the initial state,
    // of which dv makes that of c and dk that of n; null where there is none.
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    // Row sums: of dq and dk those of out . factor, [panels, B, H, S], of dv those of values . factor, by its
    // slices, [slices, B, H, S], or null where nobody wants them.
    float* whole;
    FlowSum* inter;  // [panels, B, H, slots] of a chunk's, the part from the entering state; not of dv
    // dq leaves its state before every chunk of a multiple of kAnchorChunks, for dk of the same tile to
    // multiply with: the flow of gradient over that boundary. pass_anchor_bytes of it; null for dv.
    void* states;
    float* flows;  // [B, H, anchor_slots, flow_parts], dk only: this call writes pass_flow_parts of them
    int flow_parts;
    bool accumulate;  // dq and dk: what `out` holds is added to
};

// Columns of `out` that one entry of the row sums adds up.
constexpr int kSumColumns = 64;

// Bytes of `states`, and the parts of a flow that a call writes.
std::int64_t pass_anchor_bytes(int batch, int heads, int slots, int dim_values);
int pass_flow_parts(int dim_values);

// Defined once per instance (tile). Both throw std::runtime_error on a refused launch. The second one writes
// what each segment with a boundary behind it in the walk adds by itself to the state there, and its decay;
// dq and dk only.
void mlstm_pass(const MlstmPassParams& params, void* stream);
void mlstm_pass_segments(const PassWalk& params, void* stream);

}  // namespace tfla_tk
