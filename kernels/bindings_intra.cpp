// pybind11 module of one instance of the intra-chunk kernel: integers in, two launches out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "tfla_tk/params_intra.h"

namespace {

using OperandTuple = std::array<std::int64_t, 4>;  // pointer, batch, head and row stride in elements
using GateTuple = std::array<std::int64_t, 5>;     // the same, and the DType

tfla_tk::Operand operand(const OperandTuple& x) { return {reinterpret_cast<void*>(x[0]), x[1], x[2], x[3]}; }

tfla_tk::Gate gate(const GateTuple& x) {
    return {reinterpret_cast<const void*>(x[0]), x[1], x[2], x[3], static_cast<tfla_tk::DType>(x[4])};
}

void mlstm_intra(const OperandTuple& q, const OperandTuple& k, const OperandTuple& v, const OperandTuple& h,
                 const GateTuple& i, const GateTuple& f, std::uintptr_t workspace,
                 const std::array<int, 5>& sizes, float scale, float eps, int device, std::uintptr_t stream) {
    const tfla_tk::MlstmIntraParams params{operand(q),
                                           operand(k),
                                           operand(v),
                                           operand(h),
                                           gate(i),
                                           gate(f),
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
          "Launches the intra-chunk mLSTM on a stream. sizes: batch, heads, seq, dim_qk, dim_v.");
}
