// Arguments of a walk of the backward, as Python passes them.
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// The gradient that a walk computes, and its operands; s is the scale, W the gates, w the normaliser, e as in
// params_backward.h.
//   dq_t = sum_{j <= t} s W_tj / w_t (dh_t.v_j + e_t) k_j   queries dh, keys v,  values k,  forward in time
//   dk_j = sum_{t >= j} s W_tj / w_t (v_j.dh_t + e_t) q_t   queries v,  keys dh, values q,  backward
//   dv_j = sum_{t >= j} s W_tj / w_t (k_j.q_t) dh_t         queries k,  keys q,  values dh, backward
enum class Gradient : int { dq = 0, dk = 1, dv = 2 };

// Arguments of a walk and of its segment sums. For dq and dk the keys (columns of V) may have more columns
// than an instance's tile: every tile is a share, walked by CTAs of its own, and the gradient is the sum over
// the shares. e_t is a sum over the shares too; a share uses its own term.
struct PassWalk {
    Gradient gradient;
    Operand keys, values;   // [B, H, S, *], bf16 or fp16
    const float* e;         // [B, H, S] for each share; null without normaliser: zero
    std::int64_t e_stride;  // between shares
    // c null: no sequence is cut. n null: zero; for dk there is one for each share, [shares, slots, K]
    Boundaries boundaries;
    Cut cut;
    int batch, heads, seq, dim_keys, dim_values;
    int group;             // heads of v that share one head of q and k, which have heads / group heads
    int tile_keys, slice;  // of the kernel: columns of the keys of a share, and of the values of a CTA
    bool half;             // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(gradient, tile_keys, slice, keys, values, e, e_stride, boundaries, cut);
        visit(batch, heads, seq, dim_keys, dim_values, group, half, device);
    }
};

struct MlstmSegmentsParams {
    PassWalk walk;
    Gate i, f;
    const float* log2_w;   // [B, H, S]; null without normaliser: zero
    const float* chunk_m;  // [B, H, chunk_slots, 2]; null for gates that are not stabilised
    float scale;           // of q k^T
    GateKind gate_kind;

    template <class Visit> void fields(Visit& visit) { visit(walk, i, f, log2_w, chunk_m, scale, gate_kind); }
};

struct MlstmPassParams {
    PassWalk walk;
    ChunkGates* gates;     // [B, H, chunk_slots], from mlstm_bwd_scan; also orders the shares' writes
    Operand queries, out;  // shaped like keys, like values
    Operand factor;        // like out: the row sums are of out . factor
    // entering: the state at the start of a sequence's walk, [N, H, K, V] and [N, H, K]. leaving: gradients
    // of the initial state; dv writes that of c, dk that of n for each share, [shares, N, H, K]. Null where
    // there is none.
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    // Row sums. dq and dk: of out . factor, [shares * slices, B, H, S]. dv: of values . factor, [slices, B,
    // H, S], or null where not wanted.
    float* whole;
    FlowSum*
        inter;  // [shares * slices, B, H, slots]: a chunk's row sums through the entering state; not for dv
    // Anchors: dq writes its state there, dk multiplies its own with it, which is the flow of gradient over
    // that boundary. Of pass_anchor_bytes; null for dv.
    void* states;
    float* flows;  // [B, H, anchor_slots, pass_flow_parts], dk only
    int* ticket;   // 0 at the start, set by mlstm_bwd_scan; for dq and dk with several shares

    template <class Visit> void fields(Visit& visit) {
        visit(walk, gates, queries, out, factor, entering_c, entering_n, leaving_c, leaving_n);
        visit(whole, inter, states, flows, ticket);
    }
};

// Of the walks for dq and dk: bytes of `states` for so many chunk_slots, and the number of parts of a flow.
struct PassSizes {
    int batch, heads, dim_keys, dim_values, tile_keys, slice;

    template <class Visit> void fields(Visit& visit) {
        visit(batch, heads, dim_keys, dim_values, tile_keys, slice);
    }
};
std::int64_t pass_anchor_bytes(const PassSizes& sizes, int slots);
int pass_flow_parts(const PassSizes& sizes);

// Both throw std::runtime_error on a refused launch. mlstm_pass_segments writes the sum of each segment that
// the walk leaves over a boundary, and its decay; dq and dk only.
void mlstm_pass(const MlstmPassParams& params, void* stream);
void mlstm_pass_segments(const MlstmSegmentsParams& params, void* stream);

}  // namespace tfla_tk
