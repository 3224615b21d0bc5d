// What the launcher of KDA offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "kda/bindings/params.h"
#include "sequence/read_arguments.h"

namespace tfla_tk {

void place(KdaTiles& x, const Addresses& at) { at.all(x.tiles, x.factors, x.a, x.p); }

void place(KdaMatricesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.g, x.beta, x.a_log, x.dt_bias);
    place(x.left, at);
}

void place(KdaWalkParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.values, x.results, x.entering, x.leaving, x.states);
    place(x.tiles, at);
}

namespace {

// Cut, batch, heads, seq, dim_k, dim_v, group, half, device.
KdaShape read_kda_shape(Arguments& x) {
    return {read_cut(x), x.number(), x.number(), x.number(), x.number(),
            x.number(),  x.number(), x.flag(),   x.number()};
}

KdaTiles read_tiles(Arguments& x) {
    return {x.pointer<void>(), x.pointer<void>(), x.pointer<void>(), x.pointer<void>()};
}

// shape, q, k, g with its dtype, beta, A_log, dt_bias, code of KdaGate, lower_bound, scale, l2norm,
// beta_sigmoid, beta_double, tiles.
KdaMatricesParams read_kda_matrices(Arguments& x) {
    KdaMatricesParams p{read_kda_shape(x), x.operand(), x.operand(), x.operand(), x.dtype()};
    p.beta = x.gate(), p.a_log = x.gate(), p.dt_bias = x.gate();
    p.gate = static_cast<KdaGate>(x.number()), p.lower_bound = x.real(), p.scale = x.real();
    p.l2norm = x.flag(), p.beta_sigmoid = x.flag(), p.beta_double = x.flag();
    p.left = read_tiles(x);
    return p;
}

// shape, values, results, tiles, entering, leaving, states, walkers. Address 0 of entering: zero; of leaving,
// states: not wanted.
KdaWalkParams read_kda_walk(Arguments& x) {
    KdaWalkParams p{read_kda_shape(x), x.operand(), x.operand(), read_tiles(x)};
    p.entering = x.pointer(), p.leaving = x.pointer();
    p.states = x.pointer<void>(), p.walkers = x.number();
    return p;
}

// shape: bytes of the tiles, of the factors and of A or P.
std::vector<std::int64_t> tiles_bytes(Arguments& x) {
    const KdaTilesBytes found = kda_tiles_bytes(read_kda_shape(x));
    return {found.tiles, found.factors, found.matrix};
}

// shape: bytes of the states of all chunks.
std::vector<std::int64_t> states_bytes(Arguments& x) { return {kda_states_bytes(read_kda_shape(x))}; }

}  // namespace

inline Launcher functions_of_kda_forward() {
    return {{prepares<&kda_matrices, &read_kda_matrices>("matrices"),
             prepares<&kda_forward, &read_kda_walk>("forward"),
             prepares<&kda_mirror, &read_kda_walk>("mirror"),
             {.name = "tiles_bytes", .tell = &tiles_bytes},
             {.name = "states_bytes", .tell = &states_bytes}},
            {}};
}

}  // namespace tfla_tk
