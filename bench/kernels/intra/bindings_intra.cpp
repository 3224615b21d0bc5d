// pybind11 module of one instance of the intra-chunk kernel: integers in, two launches out.
#include "params_intra.h"
#include "scalar_gate/bindings/tuples.h"

namespace {

void mlstm_intra(const tfla_tk::OperandTuple& q, const tfla_tk::OperandTuple& k,
                 const tfla_tk::OperandTuple& v, const tfla_tk::OperandTuple& h, const tfla_tk::GateTuple& i,
                 const tfla_tk::GateTuple& f, std::uintptr_t workspace, const std::array<int, 5>& sizes,
                 float scale, float eps, int device, std::uintptr_t stream) {
    const tfla_tk::MlstmIntraParams params{tfla_tk::operand(q),
                                           tfla_tk::operand(k),
                                           tfla_tk::operand(v),
                                           tfla_tk::operand(h),
                                           tfla_tk::gate(i),
                                           tfla_tk::gate(f),
                                           reinterpret_cast<float*>(workspace),
                                           sizes[0],
                                           sizes[1],
                                           sizes[2],
                                           sizes[3],
                                           sizes[4],
                                           scale,
                                           eps,
                                           device};
    tfla_tk::mlstm_intra(params, reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    m.def("mlstm_intra", &mlstm_intra, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("h"), py::arg("i"),
          py::arg("f"), py::arg("workspace"), py::arg("sizes"), py::arg("scale"), py::arg("eps"),
          py::arg("device"), py::arg("stream"),
          "Launches the intra-chunk mLSTM on a stream. sizes: batch, heads, seq, dim_qk, dim_v.",
          py::call_guard<py::gil_scoped_release>());
}
