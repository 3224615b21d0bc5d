// Arguments of a pass of the mLSTM backward, for its own pybind11 bindings.
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// The gradient that a pass makes, and what it walks over; s K^-1/2, W the gates, w the normaliser, e as in
// params_bwd.h.
//   dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j   queries dh, keys v,  values k,  forward in time
//   dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t   queries v,  keys dh, values q,  backward
//   dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t         queries k,  keys q,  values dh, backward
enum class Gradient : int { dq = 0, dk = 1, dv = 2 };

// What a pass and its segments kernel have in common. Of dq and dk the keys may have more columns than an
// instance's tile: every tile of them is a share, walked by CTAs of its own, and the gradient is the sum over
// the shares. e_t is one too, and a share takes its own part of it.
struct PassWalk {
    Gradient gradient;
    Operand keys, values;   // [B, H, S, *], bf16 or fp16
    const float* e;         // [B, H, S] of every share; null without normaliser: it is 0
    std::int64_t e_stride;  // from one share's to the next
    // c null: no sequence is cut. n null: zero; of dk it is of every share, [shares, slots, K]
    Boundaries boundaries;
    Cut cut;
    int batch, heads, seq, dim_keys, dim_values;
    int group;  // heads that share one of q and k, which have heads / group
    bool half;  // operands are fp16, not bf16
    int device;
};

struct MlstmSegmentsParams {
    PassWalk walk;
    Gate i, f;
    const float* log2_w;   // [B, H, S]; null without normaliser: it is 0
    const float* chunk_m;  // [B, H, slots, 2] of chunk_slots; null with the sigmoid gate
    float scale;           // of q k^T
    bool sigmoid_gate;
};

struct MlstmPassParams {
    PassWalk walk;
    ChunkGates* gates;     // [B, H, slots] of chunk_slots, from mlstm_bwd_scan; shares take turns by them
    Operand queries, out;  // as keys, as values
    Operand factor;        // like out: rows of the sums
    // What a sequence's walk begins with, [N, H, K, V] and [N, H, K], and the gradients of the initial state,
    // of which dv makes that of c and dk that of n, of every share, [shares, N, H, K]; null where there is
    // none.
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    // Row sums: of dq and dk those of out . factor, [shares * slices, B, H, S], of dv those of values .
    // factor, by its slices, [slices, B, H, S], or null where nobody wants them.
    float* whole;
    FlowSum*
        inter;  // [shares * slices, B, H, slots] of a chunk's, the part from the entering state; not of dv
    // dq leaves its state before every chunk of a multiple of kAnchorChunks, for dk to multiply with: the
    // flow of gradient over that boundary. pass_anchor_bytes of it; null for dv.
    void* states;
    float* flows;  // [B, H, anchor_slots, pass_flow_parts], dk only
    int* ticket;   // 0 when the pass starts, from mlstm_bwd_scan; of dq and dk where there are several shares
};

// Bytes of `states`, and the parts of a flow.
std::int64_t pass_anchor_bytes(int batch, int heads, int slots, int dim_keys, int dim_values);
int pass_flow_parts(int dim_keys, int dim_values);

// Defined once per instance (tile). Both throw std::runtime_error on a refused launch. The second one writes
// what each segment with a boundary behind it in the walk adds by itself to the state there, and its decay;
// dq and dk only.
void mlstm_pass(const MlstmPassParams& params, void* stream);
void mlstm_pass_segments(const MlstmSegmentsParams& params, void* stream);

}  // namespace tfla_tk
