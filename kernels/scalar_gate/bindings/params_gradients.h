// Arguments of the walk that makes dq, dk and dv at once, and of what makes the gates' gradients of its sums,
// as the bindings read them.
#pragma once

#include "scalar_gate/bindings/params_backward.h"

namespace tfla_tk {

// K and V up to kMostNarrow. Where a sum, a state or a gradient is not wanted its address is null.
struct MlstmGradientsParams {
    Operand q, k, v, dh;      // [B, H, S, *], bf16 or fp16; q and k have heads / group heads
    LeftStates left;          // by the forward
    const ChunkGates* gates;  // [B, H, chunk_slots], from mlstm_bwd_scan
    const float* e;           // [B, H, S]; null without normaliser
    Boundaries boundaries;    // gradients of states; c null: no sequence is cut
    // gradients of the last states and of the initial ones: [N, H, K, V] and [N, H, K]
    const float *entering_c, *entering_n;
    float *leaving_c, *leaving_n;
    Operand dq, dk, dv;  // all with H heads
    // For the gradients of the gates: q_t.dq_t and k_t.dk_t, [B, H, S], and parts of each chunk's flow,
    // [B, H, chunk_slots, kFlowParts]; null together.
    float *q_dq, *k_dk, *flows;
    Cut cut;
    int batch, heads, seq, dim_qk, dim_v;
    int group;  // heads of v that share one head of q and k
    int tile;   // of the kernel: columns of K and of V
    bool half;  // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q, k, v, dh, left, gates, e, boundaries, entering_c, entering_n, leaving_c, leaving_n, dq, dk,
              dv);
        visit(q_dq, k_dk, flows, cut, batch, heads, seq, dim_qk, dim_v, group, tile, half, device);
    }
};

// Most of a chunk's flow: one of each walker's warp, and one of n.
constexpr int kFlowParts = 9;

// The gradients of the gates of these sums.
struct MlstmGateGradientsParams {
    const float *q_dq, *k_dk, *flows;
    int parts;  // of a flow that have been written: one for 16 columns of V of the walk's tile, one of n
    Gate i, f;
    Gate di, df;           // written
    const float* chunk_m;  // [B, H, chunk_slots, 2], from the forward; null for gates that are not stabilised
    Offsets offsets;
    int batch, heads, seq;
    bool sigmoid_gate;
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q_dq, k_dk, flows, parts, i, f, di, df, chunk_m, offsets, batch, heads, seq, sigmoid_gate,
              device);
    }
};

// Both throw std::runtime_error on a refused launch; seq is at least 1.
void mlstm_gradients(const MlstmGradientsParams& params, void* stream);
void mlstm_gate_gradients(const MlstmGateGradientsParams& params, void* stream);

}  // namespace tfla_tk
