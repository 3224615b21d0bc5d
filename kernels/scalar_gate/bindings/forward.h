// What the launcher of the forward offers. Addresses are prepared ones (prepared_launches.h).
#pragma once

#include "scalar_gate/bindings/read_arguments.h"

namespace tfla_tk {

void place(State& x, const Addresses& at) { at.all(x.c, x.n, x.m); }

void place(MlstmFwdParams& x, const Addresses& at) {
    at.all(x.q, x.walk.k, x.walk.v, x.h, x.walk.i, x.walk.f, x.walk.cut.offsets, x.walk.workspace);
    place(x.walk.initial, at);
    place(x.last, at);
    at.all(x.row_n, x.row_m, x.chunk_m, x.left.states, x.left.units, x.left.norms);
}

namespace {

// q, k, v, h, i, f, initial and last state, row_n, row_m, chunk_m, states for the backward (0: not wanted),
// cut, workspace, batch, heads, seq, dim_qk, dim_v, group, tile_qk, slice_v, scale, eps, half, sigmoid_gate,
// normalize, device.
MlstmFwdParams read_forward(Arguments& x) {
    MlstmFwdParams p{};
    MlstmFwdWalk& walk = p.walk;
    p.q = x.operand(), walk.k = x.operand(), walk.v = x.operand(), p.h = x.operand();
    walk.i = x.gate(), walk.f = x.gate();
    walk.initial = read_state(x), p.last = read_state(x);
    p.row_n = x.pointer(), p.row_m = x.pointer(), p.chunk_m = x.pointer();
    p.left = read_left_states(x);
    walk.cut = read_cut(x), walk.workspace = x.pointer<void>();
    walk.batch = x.number(), walk.heads = x.number(), walk.seq = x.number();
    walk.dim_qk = x.number(), walk.dim_v = x.number(), walk.group = x.number();
    walk.tile_qk = x.number(), walk.slice_v = x.number();
    p.scale = x.real(), p.eps = x.real();
    walk.half = x.flag(), walk.sigmoid_gate = x.flag(), walk.normalize = x.flag(), walk.device = x.number();
    return p;
}

// slots, dim_qk, dim_v: bytes of the workspace of a call whose sequences are cut.
std::vector<std::int64_t> workspace_bytes(Arguments& x) {
    const std::int64_t slots = x.integer(), dim_qk = x.integer();
    return {mlstm_fwd_workspace_bytes(slots, dim_qk, x.number())};
}

// slots, dim_qk, dim_v: bytes from the start of a workspace to the states c and n at the cuts.
std::vector<std::int64_t> workspace_offsets(Arguments& x) {
    const std::int64_t slots = x.integer(), dim_qk = x.integer();
    const auto offsets = mlstm_fwd_workspace_offsets(slots, dim_qk, x.number());
    return {offsets.begin(), offsets.end()};
}

// tile_qk, slice_v.
std::vector<std::int64_t> ctas_per_multiprocessor(Arguments& x) {
    const int tile_qk = x.number();
    return {mlstm_fwd_ctas_per_multiprocessor(tile_qk, x.number())};
}

}  // namespace

inline Launcher functions_of_forward() {
    return {{prepares<&mlstm_fwd, &read_forward>("forward"),
             {.name = "workspace_bytes", .tell = &workspace_bytes},
             {.name = "workspace_offsets", .tell = &workspace_offsets},
             {.name = "ctas_per_multiprocessor", .tell = &ctas_per_multiprocessor}},
            {}};
}

}  // namespace tfla_tk
