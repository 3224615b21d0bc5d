// pybind11 module of one instance of the mirror walk of GLA's backward. Its function prepares a launch.
// Arguments are integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/slices_of_k.h"

namespace tfla_tk {

void place(GlaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.g, x.initial, x.last);
    at.all(x.borders, x.part);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> mirror(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                               const OperandTuple& dout, const OperandTuple& dv, const OperandTuple& g,
                               int g_dtype, std::int64_t d_last, std::int64_t d_initial, float scale,
                               int walkers, std::int64_t borders,
                               const std::optional<SliceOfKTuple>& slice_of_k) {
    GlaForwardParams x{shape(of), operand(q), operand(k), operand(dout), operand(dv), operand(g)};
    x.g_dtype = static_cast<DType>(g_dtype), x.scale = scale, x.walkers = walkers;
    x.initial = pointer(d_last), x.last = pointer(d_initial), x.borders = pointer(borders);
    take_slice(x, slice_of_k);
    return prepared<&gla_mirror>(x);
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("mirror", &mirror, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("dout"), py::arg("dv"),
          py::arg("g"), py::arg("g_dtype"), py::arg("d_last"), py::arg("d_initial"), py::arg("scale"),
          py::arg("walkers"), py::arg("borders"), py::arg("slice_of_k"),
          "Prepares the walk from the last chunk to the first; d_last, d_initial and borders: 0 for none; "
          "slice_of_k as the forward's.");
    export_part_bytes(m);
}
