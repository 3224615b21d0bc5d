// pybind11 module of one instance of the mLSTM backward's passes: integers in, launches out.
#include "tfla_tk/binding_types.h"
#include "tfla_tk/params_pass.h"

namespace {

using tfla_tk::OffsetsTuple;
using tfla_tk::Pair;
using tfla_tk::pointer;

using RowsTuple = std::array<std::int64_t, 3>;     // pointers to log2_w, e, chunk_m or 0
using AnchorsTuple = std::array<std::int64_t, 3>;  // pointers to states and flows or 0, parts of a flow

void mlstm_pass(int gradient, const tfla_tk::OperandTuple& queries, const tfla_tk::OperandTuple& keys,
                const tfla_tk::OperandTuple& values, const tfla_tk::OperandTuple& out,
                const tfla_tk::OperandTuple& factor, const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f,
                const RowsTuple& rows, const Pair& entering, const Pair& leaving, const Pair& sums,
                const AnchorsTuple& anchors, const OffsetsTuple& offsets, const std::array<int, 5>& sizes,
                float scale, bool half, bool sigmoid_gate, int device, std::uintptr_t stream) {
    const tfla_tk::MlstmPassParams params{static_cast<tfla_tk::Gradient>(gradient),
                                          tfla_tk::operand(queries),
                                          tfla_tk::operand(keys),
                                          tfla_tk::operand(values),
                                          tfla_tk::operand(out),
                                          tfla_tk::operand(factor),
                                          tfla_tk::gate(i),
                                          tfla_tk::gate(f),
                                          pointer(rows[0]),
                                          pointer(rows[1]),
                                          reinterpret_cast<const double*>(rows[2]),
                                          pointer(entering[0]),
                                          pointer(entering[1]),
                                          pointer(leaving[0]),
                                          pointer(leaving[1]),
                                          pointer(sums[0]),
                                          pointer(sums[1]),
                                          reinterpret_cast<void*>(anchors[0]),
                                          pointer(anchors[1]),
                                          static_cast<int>(anchors[2]),
                                          reinterpret_cast<const void*>(offsets[0]),
                                          offsets[1] != 0,
                                          static_cast<int>(offsets[2]),
                                          sizes[0],
                                          sizes[1],
                                          sizes[2],
                                          sizes[3],
                                          sizes[4],
                                          scale,
                                          half,
                                          sigmoid_gate,
                                          device};
    tfla_tk::mlstm_pass(params, reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    m.def(
        "mlstm_pass", &mlstm_pass, py::arg("gradient"), py::arg("queries"), py::arg("keys"),
        py::arg("values"), py::arg("out"), py::arg("factor"), py::arg("i"), py::arg("f"), py::arg("rows"),
        py::arg("entering"), py::arg("leaving"), py::arg("sums"), py::arg("anchors"), py::arg("offsets"),
        py::arg("sizes"), py::arg("scale"), py::arg("half"), py::arg("sigmoid_gate"), py::arg("device"),
        py::arg("stream"),
        "Launches one pass of the mLSTM backward. gradient: 0 dq, 1 dk, 2 dv; rows: log2_w, e, chunk_m; "
        "sums: whole, inter; anchors: states, flows, parts; sizes: batch, heads, seq, dim_keys, dim_values.");
    m.def("anchor_bytes", &tfla_tk::pass_anchor_bytes, py::arg("batch"), py::arg("heads"), py::arg("slots"),
          py::arg("dim_values"), "Bytes of the states that dq leaves for dk.");
    m.def("flow_parts", &tfla_tk::pass_flow_parts, py::arg("dim_values"), "Parts of a flow that dk writes.");
}
