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

void place(KdaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.v, x.o, x.initial, x.last);
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

// shape, v, o, tiles, initial, last, v_first, walkers. Address 0 of initial, last: zero, not wanted.
KdaForwardParams read_kda_forward(Arguments& x) {
    KdaForwardParams p{read_kda_shape(x), x.operand(), x.operand(), read_tiles(x)};
    p.initial = x.pointer(), p.last = x.pointer(), p.v_first = x.flag(), p.walkers = x.number();
    return p;
}

// shape: bytes of the tiles, of the factors and of A or P.
std::vector<std::int64_t> tiles_bytes(Arguments& x) {
    const KdaTilesBytes found = kda_tiles_bytes(read_kda_shape(x));
    return {found.tiles, found.factors, found.matrix};
}

}  // namespace

inline Launcher functions_of_kda_forward() {
    return {{prepares<&kda_matrices, &read_kda_matrices>("matrices"),
             prepares<&kda_forward, &read_kda_forward>("forward"),
             {.name = "tiles_bytes", .tell = &tiles_bytes}},
            {}};
}

}  // namespace tfla_tk
