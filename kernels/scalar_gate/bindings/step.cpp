// pybind11 module of the mLSTM step: integers in, one launch out.
#include "scalar_gate/bindings/params_step.h"
#include "scalar_gate/bindings/tuples_decode.h"

namespace {

void mlstm_step(const tfla_tk::GateTuple& q, const tfla_tk::GateTuple& k, const tfla_tk::GateTuple& v,
                const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f,
                const tfla_tk::StoredStateTuple& before, const tfla_tk::StoredStateTuple& after,
                std::int64_t h, const std::array<int, 2>& tiling, const std::array<int, 4>& sizes,
                float scale, float eps, bool sigmoid_gate, bool normalize, bool in_place, int device,
                std::uintptr_t stream) {
    const tfla_tk::MlstmStepParams params{tfla_tk::gate(q),
                                          tfla_tk::gate(k),
                                          tfla_tk::gate(v),
                                          tfla_tk::gate(i),
                                          tfla_tk::gate(f),
                                          tfla_tk::stored_state(before),
                                          tfla_tk::stored_state(after),
                                          reinterpret_cast<void*>(h),
                                          static_cast<tfla_tk::DType>(q[4]),
                                          {tiling[0], tiling[1]},
                                          sizes[0],
                                          sizes[1],
                                          sizes[2],
                                          sizes[3],
                                          scale,
                                          eps,
                                          sigmoid_gate,
                                          normalize,
                                          in_place,
                                          device};
    tfla_tk::mlstm_step(params, reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    tfla_tk::export_layout(m);
    m.attr("MAX_KEYS") = tfla_tk::kDecodeMaxKeys;
    m.attr("MAX_SLICES") = tfla_tk::kDecodeMaxSlices;
    m.def("mlstm_step", &mlstm_step, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("i"), py::arg("f"),
          py::arg("before"), py::arg("after"), py::arg("h"), py::arg("tiling"), py::arg("sizes"),
          py::arg("scale"), py::arg("eps"), py::arg("sigmoid_gate"), py::arg("normalize"),
          py::arg("in_place"), py::arg("device"), py::arg("stream"),
          "Launches one token. before, after: pointers to c, n, m and their DTypes; tiling: lanes, width; "
          "sizes: batch, heads, dim_qk, dim_v.",
          py::call_guard<py::gil_scoped_release>());
}
