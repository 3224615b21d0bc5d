// The arguments that Python passes to the modules of the delta rule, as tuples of integers, and the function
// that both have.
#pragma once

#include "common/prepared_launches.h"
#include "delta_rule/bindings/params.h"
#include "sequence/tuples.h"

namespace tfla_tk {

// cut (5), batch, heads, seq, dim_k, dim_v, group, half, device
using ShapeTuple = std::array<std::int64_t, 13>;
using Pair = std::array<std::int64_t, 2>;  // addresses, as of A and P

inline DeltaShape shape(const ShapeTuple& x) {
    auto number = [&](int place) { return static_cast<int>(x[place]); };
    return {cut({x[0], x[1], x[2], x[3], x[4]}),
            number(5),
            number(6),
            number(7),
            number(8),
            number(9),
            number(10),
            x[11] != 0,
            number(12)};
}

inline void place(DeltaCarryParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.carried, x.leads, x.maps, x.borders);
}

inline void export_constants(pybind11::module_& m) {
    export_chunk_and_dtypes(m);
    m.attr("SEGMENT_CHUNKS") = kSegmentChunks;
}

template <bool kBackward> void def_carry(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "carry",
        [](const ShapeTuple& of, std::int64_t carried, std::int64_t leads, std::int64_t maps,
           std::int64_t borders) {
            return prepared<&delta_carry>(DeltaCarryParams{shape(of), pointer(carried),
                                                           reinterpret_cast<int*>(leads), pointer(maps),
                                                           pointer(borders), kBackward});
        },
        py::arg("shape"), py::arg("carried"), py::arg("leads"), py::arg("maps"), py::arg("borders"),
        "Prepares what carries the states of heads without leads over the segments of a split; "
        "borders: 0 for none.");
}

}  // namespace tfla_tk
