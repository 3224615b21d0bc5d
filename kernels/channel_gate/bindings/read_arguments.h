// The arguments that functions of GLA's launchers take.
#pragma once

#include "channel_gate/bindings/params.h"
#include "sequence/read_arguments.h"

namespace tfla_tk {

// Cut, batch, heads, seq, dim_k, dim_v, half, device.
inline ChannelShape read_shape(Arguments& x) {
    return {read_cut(x), x.number(), x.number(), x.number(), x.number(), x.number(), x.flag(), x.number()};
}

inline void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at.all(x.borders, x.part);
}

// shape, q, k, v, o, g, g_dtype, initial, last, scale, tile_k, walkers, borders, slice of K: None where all
// of K is, else channels of the others, address of the part, whether it is the first one, the last one. Names
// are the forward's; the mirror has dO, dV, d_last and d_initial in the places of v, o, initial and last.
// Address 0 of initial, last, borders: zero, not wanted, no cut.
inline GlaForwardParams read_walk(Arguments& x) {
    GlaForwardParams p{read_shape(x), x.operand(), x.operand(), x.operand(),
                       x.operand(),   x.operand(), x.dtype()};
    p.initial = x.pointer(), p.last = x.pointer(), p.scale = x.real();
    p.tile_k = x.number(), p.walkers = x.number(), p.borders = x.pointer();
    p.is_first = p.is_last = true;
    if (x.given())
        p.other_dim_k = x.number(), p.part = x.pointer<void>(), p.is_first = x.flag(), p.is_last = x.flag();
    return p;
}

// shape, walkers: bytes of what a launch leaves for that of the next channels of K.
inline std::vector<std::int64_t> part_bytes(Arguments& x) {
    const ChannelShape shape = read_shape(x);
    return {gla_part_bytes(shape, x.number())};
}

}  // namespace tfla_tk
