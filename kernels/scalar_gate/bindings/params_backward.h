// Arguments of the backward's host functions but for its walks in turn (params_walk.h).
#pragma once

#include "scalar_gate/bindings/params.h"

namespace tfla_tk {

// Inputs of every row's normaliser w_t = max(|d_t|, floor_t) + eps.
struct RowNorms {
    const float* row_n;  // [B, H, S]: d_t; null without normaliser, where w_t is 1
    const float* row_m;  // [B, H, S]: m_t; null with the sigmoid gate
    float eps;

    template <class Visit> void fields(Visit& visit) { visit(row_n, row_m, eps); }
};

// Per-row terms: e_t = -(dh_t.h_t) sign(d_t) [|d_t| > floor_t], one for each share of V (params_walk.h), and
// log2 w_t for the segment sums.
struct RowFactorPointers {
    RowNorms norms;         // with row_n
    float *log2_w, *e;      // [B, H, S], null where not wanted; e one such for each share of V
    std::int64_t e_stride;  // between shares

    template <class Visit> void fields(Visit& visit) { visit(norms, log2_w, e, e_stride); }
};

// Offsets of packed sequences, as in Cut.
struct Offsets {
    const void* data;
    bool is_64bit;
    int sequences;

    template <class Visit> void fields(Visit& visit) { visit(data, is_64bit, sequences); }
};

// Scans the gates of every chunk, for all three walks.
struct MlstmBwdScanParams {
    Gate i, f;
    RowNorms norms;
    const float* chunk_m;  // [B, H, slots, 2], from the forward; null for gates that are not stabilised
    ChunkGates* gates;     // [B, H, slots], of chunk_gates_bytes each
    int* tickets;          // [2]: set to 0, for the walks of dq and dk; null: not wanted
    Offsets offsets;
    int batch, heads, seq;
    float scale;  // of q k^T
    GateKind gate_kind;
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(i, f, norms, chunk_m, gates, tickets, offsets, batch, heads, seq, scale, gate_kind, device);
    }
};

// Per-row terms with dh_t.h_t from dh and h.
struct MlstmBwdRowsParams {
    Operand dh, h;  // [B, H, S, V], bf16 or fp16, rows at multiples of 16 bytes
    RowFactorPointers rows;
    int batch, heads, seq, dim_v;
    int part_columns;  // of a share of V, at most 256
    bool half;         // operands are fp16, not bf16
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(dh, h, rows, batch, heads, seq, dim_v, part_columns, half, device);
    }
};

// Per-row terms with dh_t.h_t from the walk for dv, which writes it per slice.
struct MlstmBwdFactorsParams {
    const float* dots;          // [slices, B, H, S]
    std::int64_t slice_stride;  // between slices
    int slices;
    int part_slices;         // per share of V
    RowFactorPointers rows;  // log2_w: null
    std::int64_t count;      // B H S
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(dots, slice_stride, slices, part_slices, rows, count, device);
    }
};

// Between the segment sums and the walks: turns the segments' sums into the states that arrive at the
// boundaries, in place.
struct MlstmBwdCombineParams {
    Boundaries boundaries;  // n: [norm_parts, slots, K], one per share of V
    int norm_parts;
    const float *entering_c, *entering_n;  // [N, H, K, V] and, for the first share, [N, H, K]; null: zero
    Cut cut;
    int heads, seq, dim_qk, dim_v;
    bool backward;  // in time
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(boundaries, norm_parts, entering_c, entering_n, cut, heads, seq, dim_qk, dim_v, backward,
              device);
    }
};

// Row sums q_t.dq_t or k_t.dk_t, per share of V and slice of K.
struct RowSums {
    const float* whole;  // [slices, B, H, S]
    // [slices, B, H, slots]: per chunk, the part through the state that enters it in the walk
    const FlowSum* inter;
    int slices;

    template <class Visit> void fields(Visit& visit) { visit(whole, inter, slices); }
};

// A state and its gradient: [N, H, K, V], [N, H, K], contiguous; c, dc or n, dn are null in pairs.
struct StateGradient {
    const float *c, *dc, *n, *dn;

    template <class Visit> void fields(Visit& visit) { visit(c, dc, n, dn); }
};

// [B, H, anchor_slots, parts]: the flow <dC, C> + <dn, n> at every anchor, to be summed over the parts. Slots
// without an anchor are not written. Flows are followed from an anchor to both sides: from `after` to later
// chunks, from `before` to earlier ones. Both may be one array. Two may differ in rounding: each should be
// rounded as the sums that it is combined with.
struct Anchors {
    const float *after, *before;
    int parts;
    int chunks;  // from one anchor to the next: kAnchorChunks or half of them, else the launch throws

    template <class Visit> void fields(Visit& visit) { visit(after, before, parts, chunks); }
};

struct MlstmBwdGatesParams {
    RowSums q_dq, k_dk;
    Anchors anchors;
    Gate i, f;
    Gate di, df;           // written
    const float* chunk_m;  // [B, H, slots, 2], from the forward; null for gates that are not stabilised
    StateGradient initial, last;  // before the first and after the last token of every sequence
    void* workspace;              // of mlstm_bwd_gates_workspace_bytes
    Offsets offsets;
    int batch, heads, seq, dim_qk, dim_v;
    GateKind gate_kind;
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q_dq, k_dk, anchors, i, f, di, df, chunk_m, initial, last, workspace);
        visit(offsets, batch, heads, seq, dim_qk, dim_v, gate_kind, device);
    }
};

// The walk that makes dq, dk and dv at once, K and V up to kMostNarrow. Where a sum, a state or a gradient is
// not wanted its address is null.
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
    GateKind gate_kind;
    int device;

    template <class Visit> void fields(Visit& visit) {
        visit(q_dq, k_dk, flows, parts, i, f, di, df, chunk_m, offsets, batch, heads, seq, gate_kind, device);
    }
};

std::int64_t mlstm_bwd_gates_workspace_bytes(int heads, int sequences);
std::int64_t chunk_gates_bytes();

// All throw std::runtime_error on a refused launch; seq is at least 1.
void mlstm_bwd_scan(const MlstmBwdScanParams& params, void* stream);
void mlstm_bwd_rows(const MlstmBwdRowsParams& params, void* stream);
void mlstm_bwd_factors(const MlstmBwdFactorsParams& params, void* stream);
void mlstm_bwd_combine(const MlstmBwdCombineParams& params, void* stream);
void mlstm_bwd_gates(const MlstmBwdGatesParams& params, void* stream);
void mlstm_gradients(const MlstmGradientsParams& params, void* stream);
void mlstm_gate_gradients(const MlstmGateGradientsParams& params, void* stream);

}  // namespace tfla_tk
