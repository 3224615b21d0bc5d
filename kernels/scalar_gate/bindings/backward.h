// What the launcher of the kernels around the walks of the backward offers. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "scalar_gate/bindings/params_backward.h"
#include "scalar_gate/bindings/read_arguments.h"

namespace tfla_tk {

void place(RowNorms& x, const Addresses& at) { at.all(x.row_n, x.row_m); }

void place(RowFactorPointers& x, const Addresses& at) {
    place(x.norms, at);
    at.all(x.log2_w, x.e);
}

void place(StateGradient& x, const Addresses& at) { at.all(x.c, x.dc, x.n, x.dn); }

void place(MlstmBwdScanParams& x, const Addresses& at) {
    place(x.norms, at);
    at.all(x.i, x.f, x.chunk_m, x.gates, x.tickets, x.offsets.data);
}

void place(MlstmBwdRowsParams& x, const Addresses& at) {
    place(x.rows, at);
    at.all(x.dh, x.h);
}

void place(MlstmBwdFactorsParams& x, const Addresses& at) {
    place(x.rows, at);
    at(x.dots);
}

void place(MlstmBwdCombineParams& x, const Addresses& at) {
    at.all(x.boundaries.c, x.boundaries.n, x.boundaries.log2_decay, x.entering_c, x.entering_n);
    at(x.cut.offsets);
}

void place(MlstmBwdGatesParams& x, const Addresses& at) {
    for (RowSums* const sums : {&x.q_dq, &x.k_dk}) at.all(sums->whole, sums->inter);
    for (StateGradient* const states : {&x.initial, &x.last}) place(*states, at);
    at.all(x.anchors.after, x.anchors.before, x.i, x.f, x.di.data, x.df.data, x.chunk_m, x.workspace,
           x.offsets.data);
}

namespace {

// Row sums and their inter part, slices.
RowSums read_row_sums(Arguments& x) { return {x.pointer(), x.pointer<FlowSum>(), x.number()}; }

// Flows after and before the anchors; parts, chunks.
Anchors read_anchors(Arguments& x) { return {x.pointer(), x.pointer(), x.number(), x.number()}; }

GateGradient read_gate_gradient(Arguments& x) {
    return {x.pointer<void>(), x.integer(), x.integer(), x.integer(), x.dtype()};
}

// c, dc, n, dn.
StateGradient read_state_gradient(Arguments& x) {
    return {x.pointer(), x.pointer(), x.pointer(), x.pointer()};
}

// Address or 0, whether they are 64-bit, sequences.
Offsets read_offsets(Arguments& x) { return {x.pointer<const void>(), x.flag(), x.number()}; }

// row_n, row_m, eps.
RowNorms read_norms(Arguments& x) { return {x.pointer(), x.pointer(), x.real()}; }

// The norms, log2_w (or 0) and e, stride of the shares' e.
RowFactorPointers read_factors(Arguments& x) {
    return {read_norms(x), x.pointer(), x.pointer(), x.integer()};
}

// i, f, norms, chunk_m, gates, tickets (two ints, or 0), offsets, batch, heads, seq, scale, sigmoid_gate,
// device: the gates of every chunk as the walks take them.
MlstmBwdScanParams read_scan(Arguments& x) {
    return {x.gate(),         x.gate(),        read_norms(x), x.pointer(), x.pointer<ChunkGates>(),
            x.pointer<int>(), read_offsets(x), x.number(),    x.number(),  x.number(),
            x.real(),         x.flag(),        x.number()};
}

// dh, h, factors, batch, heads, seq, dim_v, columns of a part of V, half, device: log2 w and e of every row.
MlstmBwdRowsParams read_rows(Arguments& x) {
    return {x.operand(), x.operand(), read_factors(x), x.number(), x.number(),
            x.number(),  x.number(),  x.number(),      x.flag(),   x.number()};
}

// dots, stride of its slices, slices, slices of a part of V, factors, count of the rows, device: e of every
// row, from dh.h as the walk for dv leaves it.
MlstmBwdFactorsParams read_bwd_factors(Arguments& x) {
    return {x.pointer(), x.integer(), x.number(), x.number(), read_factors(x), x.integer(), x.number()};
}

// boundaries, norm_parts, entering c and n, cut, heads, seq, dim_qk, dim_v, backward, device: what arrives at
// the boundaries between segments.
MlstmBwdCombineParams read_combine(Arguments& x) {
    return {read_boundaries(x), x.number(), x.pointer(), x.pointer(), read_cut(x), x.number(),
            x.number(),         x.number(), x.number(),  x.flag(),    x.number()};
}

// q_dq, k_dk, anchors, i, f, di, df, chunk_m, initial, last, workspace, offsets, batch, heads, seq, dim_qk,
// dim_v, sigmoid_gate, device: the gradients of the gates.
MlstmBwdGatesParams read_gates(Arguments& x) {
    return {read_row_sums(x),
            read_row_sums(x),
            read_anchors(x),
            x.gate(),
            x.gate(),
            read_gate_gradient(x),
            read_gate_gradient(x),
            x.pointer(),
            read_state_gradient(x),
            read_state_gradient(x),
            x.pointer<void>(),
            read_offsets(x),
            x.number(),
            x.number(),
            x.number(),
            x.number(),
            x.number(),
            x.flag(),
            x.number()};
}

// heads, sequences.
std::vector<std::int64_t> gates_workspace_bytes(Arguments& x) {
    const int heads = x.number();
    return {mlstm_bwd_gates_workspace_bytes(heads, x.number())};
}

// Of one chunk.
std::vector<std::int64_t> gates_of_chunk_bytes(Arguments&) { return {chunk_gates_bytes()}; }

}  // namespace

inline Launcher functions_of_backward() {
    return {{prepares<&mlstm_bwd_scan, &read_scan>("mlstm_bwd_scan"),
             prepares<&mlstm_bwd_rows, &read_rows>("mlstm_bwd_rows"),
             prepares<&mlstm_bwd_factors, &read_bwd_factors>("mlstm_bwd_factors"),
             prepares<&mlstm_bwd_combine, &read_combine>("mlstm_bwd_combine"),
             prepares<&mlstm_bwd_gates, &read_gates>("mlstm_bwd_gates"),
             {.name = "chunk_gates_bytes", .tell = &gates_of_chunk_bytes},
             {.name = "mlstm_bwd_gates_workspace_bytes", .tell = &gates_workspace_bytes}},
            {{"ANCHOR_CHUNKS", kAnchorChunks}}};
}

}  // namespace tfla_tk
