// pybind11 module of one instance of GLA's forward. Its function prepares a launch. Arguments are integers:
// prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/slices_of_k.h"

namespace tfla_tk {

void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at.all(x.borders, x.part);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> forward(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                const OperandTuple& v, const OperandTuple& o, const OperandTuple& g,
                                int g_dtype, std::int64_t initial, std::int64_t last, float scale,
                                int walkers, std::int64_t borders,
                                const std::optional<SliceOfKTuple>& slice_of_k) {
    GlaForwardParams x{shape(of), operand(q), operand(k), operand(v), operand(o), operand(g)};
    x.g_dtype = static_cast<DType>(g_dtype), x.scale = scale, x.walkers = walkers;
    x.initial = pointer(initial), x.last = pointer(last), x.borders = pointer(borders);
    take_slice(x, slice_of_k);
    return prepared<&gla_forward>(x);
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("forward", &forward, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"),
          py::arg("g"), py::arg("g_dtype"), py::arg("initial"), py::arg("last"), py::arg("scale"),
          py::arg("walkers"), py::arg("borders"), py::arg("slice_of_k"),
          "Prepares the forward; initial, last and borders with address 0: zero, not wanted, no cut; "
          "slice_of_k: None where all of K is, else channels of the others, address of the part, whether it "
          "is the first one, the last one.");
    export_part_bytes(m);
}
