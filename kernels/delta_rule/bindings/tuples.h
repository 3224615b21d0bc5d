// The arguments that Python passes to the modules of the delta rule, as tuples of integers.
#pragma once

#include "delta_rule/bindings/params.h"
#include "sequence/tuples.h"

namespace tfla_tk {

// cut (5), batch, heads, seq, dim_k, dim_v, group, half, device
using ShapeTuple = std::array<std::int64_t, 13>;
using MatricesTuple = std::array<std::int64_t, 2>;  // pointers to A and P

inline DeltaShape shape(const ShapeTuple& x) {
    auto number = [&](int place) { return static_cast<int>(x[place]); };
    return {cut({x[0], x[1], x[2], x[3], x[4]}), number(5), number(6), number(7), number(8), number(9),
            number(10), x[11] != 0, number(12)};
}

}  // namespace tfla_tk
