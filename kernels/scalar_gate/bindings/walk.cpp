// pybind11 module of one instance of the backward's walks. Its functions prepare launches. Arguments are
// integers: prepared addresses (prepared_launches.h), strides, sizes.
#include "common/prepared_launches.h"
#include "scalar_gate/bindings/params_walk.h"
#include "scalar_gate/bindings/tuples.h"

namespace tfla_tk {

void place(PassWalk& x, const Addresses& at) {
    at.all(x.keys, x.values, x.e, x.boundaries.c, x.boundaries.n, x.boundaries.log2_decay, x.cut.offsets);
}

void place(MlstmSegmentsParams& x, const Addresses& at) {
    place(x.walk, at);
    at.all(x.i, x.f, x.log2_w, x.chunk_m);
}

void place(MlstmPassParams& x, const Addresses& at) {
    place(x.walk, at);
    at.all(x.gates, x.queries, x.out, x.factor, x.entering_c, x.entering_n, x.leaving_c, x.leaving_n);
    at.all(x.whole, x.inter, x.states, x.flows, x.ticket);
}

}  // namespace tfla_tk

namespace {

using tfla_tk::BoundariesTuple;
using tfla_tk::CutTuple;
using tfla_tk::GateTuple;
using tfla_tk::OperandTuple;
using tfla_tk::Pair;
using tfla_tk::pointer;
using tfla_tk::prepared;

using Launch = std::unique_ptr<tfla_tk::Launch>;

using RowsTuple =
    std::array<std::int64_t, 4>;  // pointers to log2_w, e or 0, e_stride, pointer to chunk_m or 0
using GatesTuple = std::array<std::int64_t, 3>;  // pointers to the chunks' gates, e or 0, e_stride
using Sizes = std::array<int, 5>;                // batch, heads, seq, dim_keys, dim_values

tfla_tk::PassWalk walk(int gradient, const OperandTuple& keys, const OperandTuple& values, std::int64_t e,
                       std::int64_t e_stride, const BoundariesTuple& boundaries, const CutTuple& cut,
                       const Sizes& sizes, int group, bool half, int device) {
    return {static_cast<tfla_tk::Gradient>(gradient),
            tfla_tk::operand(keys),
            tfla_tk::operand(values),
            pointer(e),
            e_stride,
            tfla_tk::boundaries(boundaries),
            tfla_tk::cut(cut),
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            sizes[4],
            group,
            half,
            device};
}

Launch mlstm_pass_segments(int gradient, const OperandTuple& keys, const OperandTuple& values,
                           const GateTuple& i, const GateTuple& f, const RowsTuple& rows,
                           const BoundariesTuple& boundaries, const CutTuple& cut, const Sizes& sizes,
                           int group, float scale, bool half, bool sigmoid_gate, int device) {
    const tfla_tk::MlstmSegmentsParams params{
        walk(gradient, keys, values, rows[1], rows[2], boundaries, cut, sizes, group, half, device),
        tfla_tk::gate(i),
        tfla_tk::gate(f),
        pointer(rows[0]),
        pointer(rows[3]),
        scale,
        sigmoid_gate};
    return prepared<&tfla_tk::mlstm_pass_segments>(params);
}

Launch mlstm_pass(int gradient, const OperandTuple& queries, const OperandTuple& keys,
                  const OperandTuple& values, const OperandTuple& out, const OperandTuple& factor,
                  const GatesTuple& gates, const Pair& entering, const Pair& leaving,
                  const BoundariesTuple& boundaries, const Pair& sums, const Pair& anchors,
                  std::int64_t ticket, const CutTuple& cut, const Sizes& sizes, int group, bool half,
                  int device) {
    const tfla_tk::MlstmPassParams params{
        walk(gradient, keys, values, gates[1], gates[2], boundaries, cut, sizes, group, half, device),
        reinterpret_cast<tfla_tk::ChunkGates*>(gates[0]),
        tfla_tk::operand(queries),
        tfla_tk::operand(out),
        tfla_tk::operand(factor),
        pointer(entering[0]),
        pointer(entering[1]),
        pointer(leaving[0]),
        pointer(leaving[1]),
        pointer(sums[0]),
        reinterpret_cast<tfla_tk::FlowSum*>(sums[1]),
        reinterpret_cast<void*>(anchors[0]),
        pointer(anchors[1]),
        reinterpret_cast<int*>(ticket)};
    return prepared<&tfla_tk::mlstm_pass>(params);
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    tfla_tk::export_layout(m);
    tfla_tk::export_launches(m);
    py::dict gradients;
    gradients["dq"] = static_cast<int>(tfla_tk::Gradient::dq);
    gradients["dk"] = static_cast<int>(tfla_tk::Gradient::dk);
    gradients["dv"] = static_cast<int>(tfla_tk::Gradient::dv);
    m.attr("GRADIENTS") = gradients;
    m.def("mlstm_pass", &mlstm_pass, py::arg("gradient"), py::arg("queries"), py::arg("keys"),
          py::arg("values"), py::arg("out"), py::arg("factor"), py::arg("gates"), py::arg("entering"),
          py::arg("leaving"), py::arg("boundaries"), py::arg("sums"), py::arg("anchors"), py::arg("ticket"),
          py::arg("cut"), py::arg("sizes"), py::arg("group"), py::arg("half"), py::arg("device"),
          "Prepares one pass of the mLSTM backward. gradient: 0 dq, 1 dk, 2 dv; gates: those of the chunks "
          "from mlstm_bwd_scan, e, e_stride; boundaries: c, n, log2_decay; sums: whole, inter; anchors: "
          "states, flows; ticket: pointer or 0; sizes: batch, heads, seq, dim_keys, dim_values.");
    m.def(
        "mlstm_pass_segments", &mlstm_pass_segments, py::arg("gradient"), py::arg("keys"), py::arg("values"),
        py::arg("i"), py::arg("f"), py::arg("rows"), py::arg("boundaries"), py::arg("cut"), py::arg("sizes"),
        py::arg("group"), py::arg("scale"), py::arg("half"), py::arg("sigmoid_gate"), py::arg("device"),
        "Prepares what each segment of a pass adds by itself at the boundary behind it; as mlstm_pass. rows: "
        "log2_w, e, e_stride, chunk_m.");
    m.def("anchor_bytes", &tfla_tk::pass_anchor_bytes, py::arg("batch"), py::arg("heads"), py::arg("slots"),
          py::arg("dim_keys"), py::arg("dim_values"), "Bytes of the states that dq leaves for dk.");
    m.def("flow_parts", &tfla_tk::pass_flow_parts, py::arg("dim_keys"), py::arg("dim_values"),
          "Parts of a flow that dk writes.");
}
