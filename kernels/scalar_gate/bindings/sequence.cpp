// pybind11 module of a few tokens of mLSTM: integers in, one launch out.
#include "scalar_gate/bindings/params_sequence.h"
#include "scalar_gate/bindings/tuples_decode.h"

namespace {

using TokenRowsTuple = std::array<std::int64_t, 5>;  // pointer; batch, head, token, column stride in elements

tfla_tk::TokenRows token_rows(const TokenRowsTuple& x) {
    return {reinterpret_cast<const void*>(x[0]), x[1], x[2], x[3], x[4]};
}

void mlstm_sequence(const TokenRowsTuple& q, const TokenRowsTuple& k, const TokenRowsTuple& v, int dtype,
                    const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f,
                    const tfla_tk::StoredStateTuple& before, const tfla_tk::StoredStateTuple& after,
                    std::int64_t h, const std::array<int, 2>& tiling, const std::array<int, 5>& sizes,
                    float scale, float eps, bool sigmoid_gate, bool normalize, bool in_place, int device,
                    std::uintptr_t stream) {
    const tfla_tk::MlstmSequenceParams params{token_rows(q),
                                              token_rows(k),
                                              token_rows(v),
                                              static_cast<tfla_tk::DType>(dtype),
                                              tfla_tk::gate(i),
                                              tfla_tk::gate(f),
                                              tfla_tk::stored_state(before),
                                              tfla_tk::stored_state(after),
                                              reinterpret_cast<void*>(h),
                                              {tiling[0], tiling[1]},
                                              sizes[0],
                                              sizes[1],
                                              sizes[2],
                                              sizes[3],
                                              sizes[4],
                                              scale,
                                              eps,
                                              sigmoid_gate,
                                              normalize,
                                              in_place,
                                              device};
    tfla_tk::mlstm_sequence(params, reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    tfla_tk::export_layout(m);
    m.attr("MAX_KEYS") = tfla_tk::kDecodeMaxKeys;
    m.attr("MAX_SLICES") = tfla_tk::kDecodeMaxSlices;
    m.attr("MAX_COLUMNS") = tfla_tk::kSequenceMaxColumns;
    m.def("mlstm_sequence", &mlstm_sequence, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("dtype"),
          py::arg("i"), py::arg("f"), py::arg("before"), py::arg("after"), py::arg("h"), py::arg("tiling"),
          py::arg("sizes"), py::arg("scale"), py::arg("eps"), py::arg("sigmoid_gate"), py::arg("normalize"),
          py::arg("in_place"), py::arg("device"), py::arg("stream"),
          "Launches a few tokens. dtype: of q, k, v and h; before, after: pointers to c, n, m and their "
          "DTypes; tiling: warps, width; sizes: batch, heads, tokens, dim_qk, dim_v.",
          py::call_guard<py::gil_scoped_release>());
}
