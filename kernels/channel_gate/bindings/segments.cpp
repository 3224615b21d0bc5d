// pybind11 module of the kernels that cut GLA's sequences. Its function prepares a launch. Arguments are
// integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

void place(GlaSegmentsParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.keys, x.values, x.g, x.entering, x.borders, x.decays);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> segments(const ShapeTuple& of, const OperandTuple& keys, const OperandTuple& values,
                                 const OperandTuple& g, int g_dtype, std::int64_t entering,
                                 std::int64_t borders, std::int64_t decays, float scale, bool backward) {
    return prepared<&gla_segments>(GlaSegmentsParams{shape(of), operand(keys), operand(values), operand(g),
                                                     static_cast<DType>(g_dtype), pointer(entering),
                                                     pointer(borders), pointer(decays), scale, backward});
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("segments", &segments, py::arg("shape"), py::arg("keys"), py::arg("values"), py::arg("g"),
          py::arg("g_dtype"), py::arg("entering"), py::arg("borders"), py::arg("decays"), py::arg("scale"),
          py::arg("backward"),
          "Prepares the states at the borders between segments, or their gradients; entering: 0 for none.");
}
