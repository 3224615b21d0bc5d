// The arguments that Python passes to the modules with one decay per token and head, as tuples of integers.
#pragma once

#include "scalar_gate/bindings/params.h"
#include "sequence/tuples.h"

namespace tfla_tk {

using Pair = std::array<std::int64_t, 2>;             // two pointers; 0 where there is none
using BoundariesTuple = std::array<std::int64_t, 3>;  // pointers to c, n, log2_decay; 0 where there is none

// Exports the constants that Python and the kernels share.
inline void export_layout(pybind11::module_& m) {
    export_chunk_and_dtypes(m);
    m.attr("ANCHOR_CHUNKS") = kAnchorChunks;
}

inline Boundaries boundaries(const BoundariesTuple& x) {
    return {pointer(x[0]), pointer(x[1]), reinterpret_cast<double*>(x[2])};
}

}  // namespace tfla_tk
