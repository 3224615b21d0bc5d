// The arguments that functions of the delta rule's launchers take.
#pragma once

#include "delta_rule/bindings/params.h"
#include "sequence/read_arguments.h"

namespace tfla_tk {

// Cut, batch, heads, seq, dim_k, dim_v, group, half, device.
inline DeltaShape read_shape(Arguments& x) {
    return {read_cut(x), x.number(), x.number(), x.number(), x.number(),
            x.number(),  x.number(), x.flag(),   x.number()};
}

inline void place(DeltaCarryParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.carried, x.leads, x.maps);
}

// shape, carried, leads, maps, backward: what carries the states of heads without leads over the segments of
// a split.
inline DeltaCarryParams read_carry(Arguments& x) {
    return {read_shape(x), x.pointer(), x.pointer<int>(), x.pointer(), x.flag()};
}

}  // namespace tfla_tk
