// pybind11 module of one instance of the mirror walk of GLA's backward. Its function prepares a launch.
// Arguments are integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at(x.borders);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> mirror(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                               const OperandTuple& dout, const OperandTuple& dv, const OperandTuple& g,
                               int g_dtype, std::int64_t d_last, std::int64_t d_initial, float scale,
                               int walkers, int other_dim_k, bool adds, std::int64_t borders) {
    return prepared<&gla_mirror>(GlaForwardParams{shape(of), operand(q), operand(k), operand(dout),
                                                  operand(dv), operand(g), static_cast<DType>(g_dtype),
                                                  pointer(d_last), pointer(d_initial), scale, walkers,
                                                  other_dim_k, adds, pointer(borders)});
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("mirror", &mirror, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("dout"), py::arg("dv"),
          py::arg("g"), py::arg("g_dtype"), py::arg("d_last"), py::arg("d_initial"), py::arg("scale"),
          py::arg("walkers"), py::arg("other_dim_k"), py::arg("adds"), py::arg("borders"),
          "Prepares the walk from the last chunk to the first; d_last, d_initial and borders: 0 for none.");
}
