// What the launcher of the kernels that cut GLA's sequences offers. Addresses are prepared ones
// (prepared_launches.h).
#pragma once

#include "channel_gate/bindings/read_arguments.h"

namespace tfla_tk {

void place(GlaSegmentsParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.keys, x.values, x.g, x.entering, x.borders, x.decays);
}

namespace {

// shape, keys, values, g, g_dtype, entering (0: none), borders, decays, scale, backward: the states at the
// borders between segments, or their gradients.
GlaSegmentsParams read_segments(Arguments& x) {
    return {read_shape(x), x.operand(), x.operand(), x.operand(), x.dtype(),
            x.pointer(),   x.pointer(), x.pointer(), x.real(),    x.flag()};
}

}  // namespace

inline Launcher functions_of_segments() {
    return {{prepares<&gla_segments, &read_segments>("segments")}, {}};
}

}  // namespace tfla_tk
