// pybind11 module of one instance of GLA's forward. Its function prepares a launch. Arguments are integers:
// prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at(x.borders);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> forward(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                const OperandTuple& v, const OperandTuple& o, const OperandTuple& g,
                                int g_dtype, std::int64_t initial, std::int64_t last, float scale,
                                int walkers, int other_dim_k, bool adds, std::int64_t borders) {
    return prepared<&gla_forward>(GlaForwardParams{
        shape(of), operand(q), operand(k), operand(v), operand(o), operand(g), static_cast<DType>(g_dtype),
        pointer(initial), pointer(last), scale, walkers, other_dim_k, adds, pointer(borders)});
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("forward", &forward, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"),
          py::arg("g"), py::arg("g_dtype"), py::arg("initial"), py::arg("last"), py::arg("scale"),
          py::arg("walkers"), py::arg("other_dim_k"), py::arg("adds"), py::arg("borders"),
          "Prepares the forward; initial, last and borders with address 0: zero, not wanted, no cut.");
}
