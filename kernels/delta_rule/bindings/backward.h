// What the launcher of the delta rule's backward offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "delta_rule/bindings/params_inputs.h"
#include "delta_rule/bindings/read_arguments.h"

namespace tfla_tk {

void place(DeltaMirrorParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.dout, x.writes, x.dv, x.g, x.beta, x.a, x.p);
    at.all(x.dbeta, x.d_last, x.d_initial, x.carried, x.leads, x.borders);
    at.all(x.right.dk, x.right.whole, x.right.inter, x.right.anchors);
}

void place(DeltaCombineParams& x, const Addresses& at) { at.all(x.dq_parts, x.dk_parts, x.dq, x.dk); }

void place(DeltaStrengthParams& x, const Addresses& at) { at.all(x.sums, x.dbeta); }

void place(DeltaInputsBackwardParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.dq, x.dk, x.beta, x.g, x.a_log, x.dt_bias, x.d_strength, x.d_log_decay);
    at.all(x.d_beta, x.d_g, x.sums);
}

namespace {

// shape, q, k, dout, writes, dv, g, beta, A, P, dbeta, d_last, d_initial, carried, leads, borders, scale,
// walkers, states_alone, right dk, right sums: whole, inter, anchors. Address 0 of d_last, d_initial,
// borders: none; of carried, leads: no split; of right dk: the walk does not make it; of right sums: not
// wanted.
DeltaMirrorParams read_mirror(Arguments& x) {
    DeltaMirrorParams p{read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(), x.operand()};
    p.g = x.gate(), p.beta = x.gate();
    p.a = x.pointer<void>(), p.p = x.pointer<void>(), p.dbeta = x.pointer();
    p.d_last = x.pointer(), p.d_initial = x.pointer();
    p.carried = x.pointer(), p.leads = x.pointer<int>(), p.borders = x.pointer();
    p.scale = x.real(), p.walkers = x.number(), p.states_alone = x.flag();
    p.right = {x.operand(), x.pointer(), x.pointer<FlowSum>(), x.pointer<void>()};
    return p;
}

// shape, parts of dq, parts of dk, dq, dk.
DeltaCombineParams read_combine_of_heads(Arguments& x) {
    const DeltaShape shape = read_shape(x);
    return {x.operand(), x.operand(), x.operand(), x.operand(), shape};
}

// shape, sums, parts, dbeta.
DeltaStrengthParams read_strength(Arguments& x) { return {read_shape(x), x.pointer(), x.number(), x.gate()}; }

// shape, q, k, dq, dk, beta, g, a_log, dt_bias, d_strength, d_log_decay, d_beta, d_g, sums, twice. Gradients
// of q and k are made in place; address 0: not made.
DeltaInputsBackwardParams read_inputs_backward(Arguments& x) {
    return {read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(),
            x.gate(),      x.gate(),    x.gate(),    x.gate(),    x.pointer(),
            x.pointer(),   x.gate(),    x.gate(),    x.pointer(), x.flag()};
}

}  // namespace

inline Launcher functions_of_delta_backward() {
    return {{prepares<&delta_mirror, &read_mirror>("mirror"),
             prepares<&delta_combine, &read_combine_of_heads>("combine"),
             prepares<&delta_strength, &read_strength>("strength"),
             prepares<&delta_inputs_backward, &read_inputs_backward>("inputs_backward")},
            {{"INPUT_TOKENS", kInputTokens}}};
}

}  // namespace tfla_tk
