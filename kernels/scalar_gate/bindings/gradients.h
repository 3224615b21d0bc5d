// What the launcher of the walk for dq, dk and dv offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "scalar_gate/bindings/backward.h"
#include "scalar_gate/bindings/params_gradients.h"

namespace tfla_tk {

void place(MlstmGradientsParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.v, x.dh, x.left.states, x.left.units, x.left.norms, x.gates, x.e);
    at.all(x.boundaries.c, x.boundaries.n, x.boundaries.log2_decay);
    at.all(x.entering_c, x.entering_n, x.leaving_c, x.leaving_n, x.dq, x.dk, x.dv);
    at.all(x.q_dq, x.k_dk, x.flows, x.cut.offsets);
}

void place(MlstmGateGradientsParams& x, const Addresses& at) {
    at.all(x.q_dq, x.k_dk, x.flows, x.i, x.f, x.di.data, x.df.data, x.chunk_m, x.offsets.data);
}

namespace {

// q, k, v, dh, the forward's states, the chunks' gates, e, boundaries, entering state (c, n),
// leaving state, dq, dk, dv, sums (q_dq, k_dk, flows), cut, batch, heads, seq, dim_qk, dim_v, group, tile,
// half, device.
MlstmGradientsParams read_gradients(Arguments& x) {
    MlstmGradientsParams p{x.operand(), x.operand(), x.operand(), x.operand()};
    p.left = read_left_states(x);
    p.gates = x.pointer<ChunkGates>(), p.e = x.pointer();
    p.boundaries = read_boundaries(x);
    p.entering_c = x.pointer(), p.entering_n = x.pointer();
    p.leaving_c = x.pointer(), p.leaving_n = x.pointer();
    p.dq = x.operand(), p.dk = x.operand(), p.dv = x.operand();
    p.q_dq = x.pointer(), p.k_dk = x.pointer(), p.flows = x.pointer();
    p.cut = read_cut(x);
    p.batch = x.number(), p.heads = x.number(), p.seq = x.number();
    p.dim_qk = x.number(), p.dim_v = x.number(), p.group = x.number();
    p.tile = x.number(), p.half = x.flag(), p.device = x.number();
    return p;
}

// q_dq, k_dk, flows, parts, i, f, di, df, chunk_m, offsets, batch, heads, seq, sigmoid_gate, device.
MlstmGateGradientsParams read_gate_gradients(Arguments& x) {
    return {x.pointer(),
            x.pointer(),
            x.pointer(),
            x.number(),
            x.gate(),
            x.gate(),
            read_gate_gradient(x),
            read_gate_gradient(x),
            x.pointer(),
            read_offsets(x),
            x.number(),
            x.number(),
            x.number(),
            x.flag(),
            x.number()};
}

}  // namespace

inline Launcher functions_of_gradients() {
    return {{prepares<&mlstm_gradients, &read_gradients>("gradients"),
             prepares<&mlstm_gate_gradients, &read_gate_gradients>("gate_gradients")},
            {{"STATE_CHUNKS", kStateChunks}, {"FLOW_PARTS", kFlowParts}}};
}

}  // namespace tfla_tk
