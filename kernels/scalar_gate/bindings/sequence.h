// What the launcher of a few tokens of mLSTM offers. Addresses are those of the tensors.
#pragma once

#include "scalar_gate/bindings/params_sequence.h"
#include "scalar_gate/bindings/read_arguments.h"

namespace tfla_tk {
namespace {

// Address; strides of batch, head, token and column.
TokenRows read_rows(Arguments& x) {
    return {x.pointer<const void>(), x.integer(), x.integer(), x.integer(), x.integer()};
}

// q, k, v, their and h's dtype, i, f, state before, state after, h, warps, width, batch, heads, tokens,
// dim_qk, dim_v, scale, eps, sigmoid_gate, normalize, in_place, device, stream. Launches a few tokens.
void sequence(Arguments& x) {
    MlstmSequenceParams p{read_rows(x), read_rows(x), read_rows(x), x.dtype(), x.gate(), x.gate()};
    p.before = read_stored_state(x), p.after = read_stored_state(x);
    p.h = x.pointer<void>(), p.tiling = {x.number(), x.number()};
    p.batch = x.number(), p.heads = x.number(), p.tokens = x.number();
    p.dim_qk = x.number(), p.dim_v = x.number(), p.scale = x.real(), p.eps = x.real();
    p.sigmoid_gate = x.flag(), p.normalize = x.flag(), p.in_place = x.flag(), p.device = x.number();
    void* const stream = x.pointer<void>();
    x.end();
    mlstm_sequence(p, stream);
}

}  // namespace

inline Launcher functions_of_sequence() {
    return {{{.name = "mlstm_sequence", .run = &sequence}}, {{"MAX_COLUMNS", kSequenceMaxColumns}}};
}

}  // namespace tfla_tk
