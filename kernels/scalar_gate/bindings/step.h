// What the launcher of the mLSTM step offers. Addresses are those of the tensors.
#pragma once

#include "scalar_gate/bindings/params_step.h"
#include "scalar_gate/bindings/read_arguments.h"

namespace tfla_tk {
namespace {

// q, k, v, i, f, state before, state after, h, lanes, width, batch, heads, dim_qk, dim_v, scale, eps,
// sigmoid_gate, normalize, in_place, device, stream. Launches one token.
void step(Arguments& x) {
    MlstmStepParams p{x.gate(), x.gate(), x.gate(), x.gate(), x.gate()};
    p.before = read_stored_state(x), p.after = read_stored_state(x);
    p.h = x.pointer<void>(), p.h_dtype = p.q.dtype;
    p.tiling = {x.number(), x.number()};
    p.batch = x.number(), p.heads = x.number(), p.dim_qk = x.number(), p.dim_v = x.number();
    p.scale = x.real(), p.eps = x.real();
    p.sigmoid_gate = x.flag(), p.normalize = x.flag(), p.in_place = x.flag(), p.device = x.number();
    void* const stream = x.pointer<void>();
    x.end();
    mlstm_step(p, stream);
}

}  // namespace

inline Launcher functions_of_step() {
    return {{{.name = "mlstm_step", .run = &step}},
            {{"MAX_KEYS", kDecodeMaxKeys}, {"MAX_SLICES", kDecodeMaxSlices}}};
}

}  // namespace tfla_tk
