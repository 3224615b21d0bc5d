// What KDA's launcher offers of the parallel half of the backward. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "kda/bindings/forward.h"

namespace tfla_tk {

void place(KdaGradientsParams& x, const Addresses& at) {
    place(x.of, at);
    at.all(x.v, x.d_out, x.solved, x.states, x.state_gradients, x.dq, x.dk, x.dg, x.dbeta, x.of_bias,
           x.of_rate);
}

namespace {

// As read_kda_matrices, then v, states, their gradients, do, R', over which dv is written, dq, dk, dg, dbeta,
// parts of d dt_bias and of dA_log. Address 0 of these parts: not wanted.
KdaGradientsParams read_kda_gradients(Arguments& x) {
    KdaGradientsParams p{read_kda_matrices(x), x.operand()};
    p.states = x.pointer<const void>(), p.state_gradients = x.pointer<const void>();
    p.d_out = x.operand(), p.solved = x.operand();
    p.dq = x.operand(), p.dk = x.operand(), p.dg = x.operand();
    p.dbeta = x.pointer(), p.of_bias = x.pointer(), p.of_rate = x.pointer();
    return p;
}

}  // namespace

inline Launcher functions_of_kda_gradients() {
    return {{prepares<&kda_gradients, &read_kda_gradients>("gradients")}, {}};
}

}  // namespace tfla_tk
