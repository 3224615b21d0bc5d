// Launches of the forward and of its mirror that take some channels of K each, as Python passes them.
#pragma once

#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

// of a launch: channels of the others, address of the part, whether it is the first one, the last one
using SliceOfKTuple = std::tuple<int, std::int64_t, bool, bool>;

inline void take_slice(GlaForwardParams& x, const std::optional<SliceOfKTuple>& slice) {
    const auto [others, part, is_first, is_last] = slice.value_or(SliceOfKTuple{0, 0, true, true});
    x.other_dim_k = others, x.part = pointer(part), x.is_first = is_first, x.is_last = is_last;
}

inline void export_part_bytes(pybind11::module_& m) {
    m.def(
        "part_bytes", [](const ShapeTuple& of, int walkers) { return gla_part_bytes(shape(of), walkers); },
        pybind11::arg("shape"), pybind11::arg("walkers"),
        "Bytes of what a launch leaves for that of the next channels of K.");
}

}  // namespace tfla_tk
