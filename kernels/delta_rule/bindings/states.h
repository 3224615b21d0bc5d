// What the launcher of the walks for the gradients of q and k offers. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "delta_rule/bindings/params_states.h"
#include "delta_rule/bindings/read_arguments.h"

namespace tfla_tk {

void place(DeltaStatesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.writes, x.dout, x.dv, x.dq, x.left, x.dk);
    at.all(x.g, x.beta, x.entering, x.leaving, x.borders, x.whole, x.inter, x.anchors, x.flows, x.written,
           x.low);
}

namespace {

// shape, q, k, writes, dout, dv, dq, left, dk, g, beta, entering, leaving, borders, sums: whole, inter,
// anchors, flows; written, low, scale, shared. entering, leaving: the states that sequences begin and end
// with, borders: those of the segments between, 0 for none; written, low: workspaces of written_bytes and
// low_bytes; shared: heads of v that share a head of the results.
DeltaStatesParams read_walk(Arguments& x) {
    DeltaStatesParams p{read_shape(x), x.operand(), x.operand(), x.operand(), x.operand(), x.operand()};
    p.dq = x.operand(), p.left = x.operand(), p.dk = x.operand();
    p.g = x.gate(), p.beta = x.gate();
    p.entering = x.pointer(), p.leaving = x.pointer(), p.borders = x.pointer();
    p.whole = x.pointer(), p.inter = x.pointer<FlowSum>(), p.anchors = x.pointer<void>(),
    p.flows = x.pointer();
    p.written = x.pointer<int>(), p.low = x.pointer<void>();
    p.scale = x.real(), p.shared = x.number();
    return p;
}

std::vector<std::int64_t> anchor_bytes(Arguments& x) { return {delta_anchor_bytes(read_shape(x))}; }

// shape, shared.
template <auto kBytes> std::vector<std::int64_t> bytes_of_shared(Arguments& x) {
    const DeltaShape shape = read_shape(x);
    return {kBytes(shape, x.number())};
}

}  // namespace

inline Launcher functions_of_delta_states() {
    return {{prepares<&delta_left, &read_walk>("left"),
             prepares<&delta_right, &read_walk>("right"),
             {.name = "anchor_bytes", .tell = &anchor_bytes},
             {.name = "written_bytes", .tell = &bytes_of_shared<&delta_written_bytes>},
             {.name = "low_bytes", .tell = &bytes_of_shared<&delta_low_bytes>}},
            {{"DELTA_ANCHOR_CHUNKS", kDeltaAnchorChunks}}};
}

}  // namespace tfla_tk
