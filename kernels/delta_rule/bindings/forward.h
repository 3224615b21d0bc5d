// What the launcher of the delta rule's forward offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "delta_rule/bindings/params_inputs.h"
#include "delta_rule/bindings/read_arguments.h"

namespace tfla_tk {

void place(DeltaMatricesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.g, x.beta, x.a, x.p, x.bounds);
}

void place(DeltaLeadsParams& x, const Addresses& at) { at.all(x.shape.cut.offsets, x.bounds, x.leads); }

void place(DeltaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.writes, x.g, x.beta, x.a, x.p, x.initial, x.last);
    at.all(x.carried, x.leads, x.borders, x.states, x.made);
}

void place(DeltaMapsParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.k, x.v, x.g, x.beta, x.a, x.initial, x.carried, x.leads, x.maps,
           x.transposed);
}

void place(DeltaInputsParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.unit_q, x.unit_k, x.beta, x.g, x.a_log, x.dt_bias, x.strength, x.log_decay);
}

namespace {

// shape, q, k, g, beta, A, P, scale, bounds. P and bounds: made where their addresses are not 0.
DeltaMatricesParams read_matrices(Arguments& x) {
    return {read_shape(x),     x.operand(), x.operand(),
            x.gate(),          x.gate(),    x.pointer<void>(),
            x.pointer<void>(), x.real(),    x.pointer<ChunkBounds>()};
}

// shape, bounds, leads, longest, both. Leads of a split's segments, int32 [2, segments, heads]; both: else
// only those before the segments.
DeltaLeadsParams read_leads(Arguments& x) {
    return {read_shape(x), x.pointer<ChunkBounds>(), x.pointer<int>(), x.number(), x.flag()};
}

// shape, q, k, v, o, writes, g, beta, A, P, made, initial, last, carried, leads, borders, states, scale,
// walkers, makers, makes_matrices. Address 0 of writes, initial, last, borders, states: not wanted, zero; of
// carried, leads: no split.
DeltaForwardParams read_forward(Arguments& x) {
    DeltaForwardParams p{read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(), x.operand()};
    p.g = x.gate(), p.beta = x.gate();
    p.a = x.pointer<void>(), p.p = x.pointer<void>(), p.made = x.pointer<int>();
    p.initial = x.pointer(), p.last = x.pointer(), p.carried = x.pointer(), p.leads = x.pointer<int>();
    p.borders = x.pointer(), p.states = x.pointer<void>(), p.scale = x.real();
    p.walkers = x.number(), p.makers = x.number(), p.makes_matrices = x.flag();
    return p;
}

// shape, k, v, g, beta, A, initial, carried, leads, M (0: not wanted), M transposed.
DeltaMapsParams read_maps(Arguments& x) {
    return {read_shape(x), x.operand(), x.operand(),      x.gate(),    x.gate(),   x.pointer<void>(),
            x.pointer(),   x.pointer(), x.pointer<int>(), x.pointer(), x.pointer()};
}

// shape, q, k, unit_q, unit_k, beta, g, a_log, dt_bias, strength, log_decay, twice. Address 0: not to be
// made.
DeltaInputsParams read_inputs(Arguments& x) {
    return {read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(), x.gate(),
            x.gate(),      x.gate(),    x.gate(),    x.pointer(), x.pointer(), x.flag()};
}

}  // namespace

inline Launcher functions_of_delta_forward() {
    return {
        {prepares<&delta_matrices, &read_matrices>("matrices"), prepares<&delta_leads, &read_leads>("leads"),
         prepares<&delta_forward, &read_forward>("forward"), prepares<&delta_maps, &read_maps>("maps"),
         prepares<&delta_carry, &read_carry>("carry"), prepares<&delta_inputs, &read_inputs>("inputs")},
        {{"SEGMENT_CHUNKS", kSegmentChunks}}};
}

}  // namespace tfla_tk
