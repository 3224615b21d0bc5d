// What the launcher of the walks of GLA's backward over the states offers. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/read_arguments.h"

namespace tfla_tk {

void place(GlaStatesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.dout, x.g, x.result, x.inflow, x.dg);
    at.all(x.entering, x.d_last, x.borders, x.d_borders, x.flows, x.anchors, x.sums);
}

namespace {

// shape, q, k, v, dout, g, g_dtype, result, gates: None where dg is not needed, else inflow, dg, d_last,
// flows, anchors; entering, scale, tile_v, walkers, borders, d_borders, slice of V: None where all of V is,
// else columns of the others, address of the sums, whether it is the first one, the last one. Address 0 of
// entering, d_last, flows, borders: none.
GlaStatesParams read_states(Arguments& x) {
    GlaStatesParams p{read_shape(x), x.operand(), x.operand(), x.operand(),
                      x.operand(),   x.operand(), x.dtype()};
    p.result = x.operand();
    p.needs_dg = x.given();
    if (p.needs_dg) {
        p.inflow = x.operand(), p.dg = x.operand();
        p.d_last = x.pointer(), p.flows = x.pointer(), p.anchors = x.pointer<void>();
    }
    p.entering = x.pointer(), p.scale = x.real(), p.tile_v = x.number(), p.walkers = x.number();
    p.borders = x.pointer(), p.d_borders = x.pointer();
    p.is_first = p.is_last = true;
    if (x.given())
        p.other_dim_v = x.number(), p.sums = x.pointer<void>(), p.is_first = x.flag(), p.is_last = x.flag();
    return p;
}

// shape, tile_v: bytes of the states that the walk "left" leaves at the anchors, of a slice of V.
std::vector<std::int64_t> anchor_bytes(Arguments& x) {
    const ChannelShape shape = read_shape(x);
    return {gla_anchor_bytes(shape, x.number())};
}

// Bytes of what a walk hands from slice to slice of V.
std::vector<std::int64_t> sums_bytes(Arguments& x) { return {gla_sums_bytes(read_shape(x))}; }

}  // namespace

inline Launcher functions_of_states() {
    return {{prepares<&gla_left, &read_states>("left"),
             prepares<&gla_right, &read_states>("right"),
             {.name = "anchor_bytes", .tell = &anchor_bytes},
             {.name = "sums_bytes", .tell = &sums_bytes}},
            {{"ANCHOR_CHUNKS", kAnchorChunks}}};
}

}  // namespace tfla_tk
