// The arguments that Python passes to the modules of this family, as tuples of integers.
#pragma once

#include "channel_gate/bindings/params.h"
#include "common/prepared_launches.h"
#include "sequence/tuples.h"

namespace tfla_tk {

// cut (5), batch, heads, seq, dim_k, dim_v, half, device
using ShapeTuple = std::array<std::int64_t, 12>;

inline ChannelShape shape(const ShapeTuple& x) {
    auto number = [&](int place) { return static_cast<int>(x[place]); };
    return {cut({x[0], x[1], x[2], x[3], x[4]}),
            number(5),
            number(6),
            number(7),
            number(8),
            number(9),
            x[10] != 0,
            number(11)};
}

}  // namespace tfla_tk
