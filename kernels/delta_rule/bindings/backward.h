// What the launcher of the delta rule's backward offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "delta_rule/bindings/params_inputs.h"
#include "delta_rule/bindings/read_arguments.h"

namespace tfla_tk {

void place(DeltaMirrorParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.dout, x.writes, x.dv, x.g, x.beta, x.a, x.p);
    at.all(x.strengths, x.d_last, x.d_initial, x.carried, x.leads, x.borders);
}

void place(DeltaGradientsParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.dout, x.writes, x.dq, x.dk, x.turns, x.dv, x.g, x.beta, x.a);
    at.all(x.states, x.d_last, x.d_initial, x.carried, x.leads, x.strengths, x.token_sums, x.flows);
}

void place(DeltaDecayParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.g, x.dg, x.token_sums, x.flows);
}

void place(DeltaCombineParams& x, const Addresses& at) { at.all(x.dq_parts, x.dk_parts, x.dq, x.dk); }

void place(DeltaStrengthParams& x, const Addresses& at) { at.all(x.sums, x.dbeta); }

void place(DeltaInputsBackwardParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.dq, x.dk, x.beta, x.g, x.a_log, x.dt_bias, x.d_strength, x.d_log_decay);
    at.all(x.d_beta, x.d_g, x.sums);
}

namespace {

// shape, q, k, dout, writes, dv, g, beta, A, P, strengths, d_last, d_initial, carried, leads, borders, scale,
// walkers. Address 0 of d_last, d_initial, borders: none; of carried, leads: no split.
DeltaMirrorParams read_mirror(Arguments& x) {
    DeltaMirrorParams p{read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(), x.operand()};
    p.g = x.gate(), p.beta = x.gate();
    p.a = x.pointer<void>(), p.p = x.pointer<void>(), p.strengths = x.pointer();
    p.d_last = x.pointer(), p.d_initial = x.pointer();
    p.carried = x.pointer(), p.leads = x.pointer<int>(), p.borders = x.pointer();
    p.scale = x.real(), p.walkers = x.number();
    return p;
}

// shape, q, k, dout, writes, dq, dk, turns, dv, g, beta, A, states, d_last, d_initial, carried, leads,
// strengths, token_sums, flows, scale. Address 0 of d_last, d_initial: none; of carried, leads: no split; of
// turns: V is one slice; of token_sums, flows: not wanted.
DeltaGradientsParams read_gradients(Arguments& x) {
    DeltaGradientsParams p{read_shape(x), x.operand(), x.operand(), x.operand(), x.operand()};
    p.dq = x.operand(), p.dk = x.operand(), p.turns = x.pointer<int>(), p.dv = x.operand();
    p.g = x.gate(), p.beta = x.gate();
    p.a = x.pointer<void>(), p.states = x.pointer<void>();
    p.d_last = x.pointer(), p.d_initial = x.pointer(), p.carried = x.pointer(), p.leads = x.pointer<int>();
    p.strengths = x.pointer(), p.token_sums = x.pointer(), p.flows = x.pointer(), p.scale = x.real();
    return p;
}

// shape, slots, g, dg, token_sums, flows.
DeltaDecayParams read_decay(Arguments& x) {
    return {read_shape(x), x.number(), x.gate(), x.gate(), x.pointer(), x.pointer()};
}

// shape, parts of dq, parts of dk, dq, dk, of_floats.
DeltaCombineParams read_combine_of_heads(Arguments& x) {
    const DeltaShape shape = read_shape(x);
    DeltaCombineParams p{x.operand(), x.operand(), x.operand(), x.operand(), shape};
    p.of_floats = x.flag();
    return p;
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
             prepares<&delta_gradients, &read_gradients>("gradients"),
             prepares<&delta_decay, &read_decay>("decay"),
             prepares<&delta_combine, &read_combine_of_heads>("combine"),
             prepares<&delta_strength, &read_strength>("strength"),
             prepares<&delta_inputs_backward, &read_inputs_backward>("inputs_backward")},
            {{"INPUT_TOKENS", kInputTokens},
             {"DELTA_DECAY_CHUNKS", kDecayChunks},
             {"DELTA_SLICE_COLUMNS", kSliceColumns},
             {"DELTA_KEYS_WARPS", kKeysWarps}}};
}

}  // namespace tfla_tk
