// What the launcher of the backward's walks offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "scalar_gate/bindings/params_walk.h"
#include "scalar_gate/bindings/read_arguments.h"

namespace tfla_tk {

void place(PassWalk& x, const Addresses& at) {
    at.all(x.keys, x.values, x.e, x.boundaries.c, x.boundaries.n, x.boundaries.log2_decay, x.cut.offsets);
}

void place(MlstmSegmentsParams& x, const Addresses& at) {
    place(x.walk, at);
    at.all(x.i, x.f, x.log2_w, x.chunk_m);
}

void place(MlstmPassParams& x, const Addresses& at) {
    place(x.walk, at);
    at.all(x.gates, x.queries, x.out, x.factor, x.entering_c, x.entering_n, x.leaving_c, x.leaving_n);
    at.all(x.whole, x.inter, x.states, x.flows, x.ticket);
}

namespace {

// What both begin with: gradient, tile_keys, slice, keys, values, e (0: none), e_stride, boundaries, cut,
// batch, heads, seq, dim_keys, dim_values, group, half, device.
PassWalk read_walk(Arguments& x) {
    PassWalk p{static_cast<Gradient>(x.integer())};
    p.tile_keys = x.number(), p.slice = x.number();
    p.keys = x.operand(), p.values = x.operand(), p.e = x.pointer(), p.e_stride = x.integer();
    p.boundaries = read_boundaries(x), p.cut = read_cut(x);
    p.batch = x.number(), p.heads = x.number(), p.seq = x.number();
    p.dim_keys = x.number(), p.dim_values = x.number(), p.group = x.number();
    p.half = x.flag(), p.device = x.number();
    return p;
}

// The walk, i, f, log2_w (0: none), chunk_m (0: none), scale, sigmoid_gate.
MlstmSegmentsParams read_segments(Arguments& x) {
    return {read_walk(x), x.gate(), x.gate(), x.pointer(), x.pointer(), x.real(), x.flag()};
}

// The walk, the chunks' gates of mlstm_bwd_scan, queries, out, factor, entering and leaving state (c, n),
// sums: whole, inter; anchors: states, flows; ticket.
MlstmPassParams read_pass(Arguments& x) {
    MlstmPassParams p{read_walk(x), x.pointer<ChunkGates>(), x.operand(), x.operand(), x.operand()};
    p.entering_c = x.pointer(), p.entering_n = x.pointer();
    p.leaving_c = x.pointer(), p.leaving_n = x.pointer();
    p.whole = x.pointer(), p.inter = x.pointer<FlowSum>();
    p.states = x.pointer<void>(), p.flows = x.pointer(), p.ticket = x.pointer<int>();
    return p;
}

// The walk for dq of batch, heads, dim_keys, dim_values, tile_keys, slice.
PassWalk read_sizes(Arguments& x) {
    PassWalk p{Gradient::dq};
    p.batch = x.number(), p.heads = x.number(), p.dim_keys = x.number(), p.dim_values = x.number();
    p.tile_keys = x.number(), p.slice = x.number();
    return p;
}

// Sizes, chunk_slots: bytes of the states that "dq" leaves at the anchors.
std::vector<std::int64_t> anchor_bytes(Arguments& x) {
    const PassWalk walk = read_sizes(x);
    return {pass_anchor_bytes(walk, x.number())};
}

// Sizes: the number of parts of a flow.
std::vector<std::int64_t> flow_parts(Arguments& x) { return {pass_flow_parts(read_sizes(x))}; }

}  // namespace

inline Launcher functions_of_walk() {
    return {{prepares<&mlstm_pass, &read_pass>("walk"),
             prepares<&mlstm_pass_segments, &read_segments>("segments"),
             {.name = "anchor_bytes", .tell = &anchor_bytes},
             {.name = "flow_parts", .tell = &flow_parts}},
            {{"GRADIENTS.dq", static_cast<int>(Gradient::dq)},
             {"GRADIENTS.dk", static_cast<int>(Gradient::dk)},
             {"GRADIENTS.dv", static_cast<int>(Gradient::dv)}}};
}

}  // namespace tfla_tk
