// A launch of the forward or of its mirror, as Python passes it. It may take some channels of K alone.
#pragma once

#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

// of a launch: channels of the others, address of the part, whether it is the first one, the last one
using SliceOfKTuple = std::tuple<int, std::int64_t, bool, bool>;

inline void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at.all(x.borders, x.part);
}

// Prepares it. Names are the forward's; the mirror has dO, dV, d_last and d_initial in the places of v, o,
// initial and last.
template <auto kLaunch>
std::unique_ptr<Launch> prepared_walk(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                      const OperandTuple& v, const OperandTuple& o, const OperandTuple& g,
                                      int g_dtype, std::int64_t initial, std::int64_t last, float scale,
                                      int walkers, std::int64_t borders,
                                      const std::optional<SliceOfKTuple>& slice) {
    const auto [others, part, is_first, is_last] = slice.value_or(SliceOfKTuple{0, 0, true, true});
    return prepared<kLaunch>(GlaForwardParams{shape(of), operand(q), operand(k), operand(v), operand(o),
                                              operand(g), static_cast<DType>(g_dtype), pointer(initial),
                                              pointer(last), scale, walkers, pointer(borders), others,
                                              pointer(part), is_first, is_last});
}

inline void export_part_bytes(pybind11::module_& m) {
    m.def(
        "part_bytes", [](const ShapeTuple& of, int walkers) { return gla_part_bytes(shape(of), walkers); },
        pybind11::arg("shape"), pybind11::arg("walkers"),
        "Bytes of what a launch leaves for that of the next channels of K.");
}

}  // namespace tfla_tk
