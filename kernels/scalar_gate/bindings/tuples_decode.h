// The state of decoding as Python passes it to the modules.
#pragma once

#include "scalar_gate/bindings/params_decode.h"
#include "scalar_gate/bindings/tuples.h"

namespace tfla_tk {

// pointers to c, n, m (0 with the sigmoid gate), and their DTypes
using StoredStateTuple = std::array<std::int64_t, 6>;

inline StoredState stored_state(const StoredStateTuple& x) {
    const auto dtype = [&](int n) { return static_cast<DType>(x[n]); };
    return {reinterpret_cast<void*>(x[0]),
            reinterpret_cast<void*>(x[1]),
            reinterpret_cast<void*>(x[2]),
            dtype(3),
            dtype(4),
            dtype(5)};
}

}  // namespace tfla_tk
