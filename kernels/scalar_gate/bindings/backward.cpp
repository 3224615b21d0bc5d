// pybind11 module of the kernels around the walks of the backward. Its functions prepare launches. Arguments
// are integers: prepared addresses (prepared_launches.h), strides, sizes.
#include "common/prepared_launches.h"
#include "scalar_gate/bindings/params_backward.h"
#include "scalar_gate/bindings/tuples.h"

namespace tfla_tk {

void place(RowNorms& x, const Addresses& at) { at.all(x.row_n, x.row_m); }

void place(RowFactorPointers& x, const Addresses& at) {
    place(x.norms, at);
    at.all(x.log2_w, x.e);
}

void place(StateGradient& x, const Addresses& at) { at.all(x.c, x.dc, x.n, x.dn); }

void place(MlstmBwdScanParams& x, const Addresses& at) {
    place(x.norms, at);
    at.all(x.i, x.f, x.chunk_m, x.gates, x.tickets, x.offsets.data);
}

void place(MlstmBwdRowsParams& x, const Addresses& at) {
    place(x.rows, at);
    at.all(x.dh, x.h);
}

void place(MlstmBwdFactorsParams& x, const Addresses& at) {
    place(x.rows, at);
    at(x.dots);
}

void place(MlstmBwdCombineParams& x, const Addresses& at) {
    at.all(x.boundaries.c, x.boundaries.n, x.boundaries.log2_decay, x.entering_c, x.entering_n);
    at(x.cut.offsets);
}

void place(MlstmBwdGatesParams& x, const Addresses& at) {
    for (RowSums* const sums : {&x.q_dq, &x.k_dk}) at.all(sums->whole, sums->inter);
    for (StateGradient* const states : {&x.initial, &x.last}) place(*states, at);
    at.all(x.anchors.after, x.anchors.before, x.i, x.f, x.di.data, x.df.data, x.chunk_m, x.workspace,
           x.offsets.data);
}

}  // namespace tfla_tk

namespace {

using tfla_tk::OffsetsTuple;
using tfla_tk::Pair;
using tfla_tk::pointer;
using tfla_tk::prepared;

using Launch = std::unique_ptr<tfla_tk::Launch>;

using RowSumsTuple = std::array<std::int64_t, 3>;  // pointers to the row sums and to their inter part, slices
using AnchorsTuple = std::array<std::int64_t, 4>;  // pointers to the flows after and before; parts, chunks
using StateTuple = std::array<std::int64_t, 4>;    // pointers to c, dc, n, dn
using DotsTuple = std::array<std::int64_t, 4>;     // pointer, stride of slices, slices, slices per share of V
// pointers to log2_w (or 0) and e, stride of the shares' e
using FactorsTuple = std::array<std::int64_t, 3>;

tfla_tk::RowSums row_sums(const RowSumsTuple& x) {
    return {pointer(x[0]), reinterpret_cast<const tfla_tk::FlowSum*>(x[1]), static_cast<int>(x[2])};
}

tfla_tk::Anchors anchors_of(const AnchorsTuple& x) {
    return {pointer(x[0]), pointer(x[1]), static_cast<int>(x[2]), static_cast<int>(x[3])};
}

tfla_tk::GateGradient gate_gradient(const tfla_tk::GateTuple& x) {
    return {reinterpret_cast<void*>(x[0]), x[1], x[2], x[3], static_cast<tfla_tk::DType>(x[4])};
}

tfla_tk::StateGradient state(const StateTuple& x) {
    return {pointer(x[0]), pointer(x[1]), pointer(x[2]), pointer(x[3])};
}

tfla_tk::Offsets offsets_of(const OffsetsTuple& x) {
    return {reinterpret_cast<const void*>(x[0]), x[1] != 0, static_cast<int>(x[2])};
}

tfla_tk::RowNorms row_norms(const Pair& rows, float eps) { return {pointer(rows[0]), pointer(rows[1]), eps}; }

tfla_tk::RowFactorPointers row_factors(const Pair& rows, const FactorsTuple& factors, float eps) {
    return {row_norms(rows, eps), pointer(factors[0]), pointer(factors[1]), factors[2]};
}

Launch mlstm_bwd_scan(const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f, const Pair& rows,
                      std::int64_t chunk_m, std::int64_t gates, std::int64_t tickets,
                      const OffsetsTuple& offsets, const std::array<int, 3>& sizes, float eps, float scale,
                      bool sigmoid_gate, int device) {
    const tfla_tk::MlstmBwdScanParams params{tfla_tk::gate(i),
                                             tfla_tk::gate(f),
                                             row_norms(rows, eps),
                                             pointer(chunk_m),
                                             reinterpret_cast<tfla_tk::ChunkGates*>(gates),
                                             reinterpret_cast<int*>(tickets),
                                             offsets_of(offsets),
                                             sizes[0],
                                             sizes[1],
                                             sizes[2],
                                             scale,
                                             sigmoid_gate,
                                             device};
    return prepared<&tfla_tk::mlstm_bwd_scan>(params);
}

Launch mlstm_bwd_rows(const tfla_tk::OperandTuple& dh, const tfla_tk::OperandTuple& h, const Pair& rows,
                      const FactorsTuple& factors, const std::array<int, 5>& sizes, float eps, bool half,
                      int device) {
    const tfla_tk::MlstmBwdRowsParams params{tfla_tk::operand(dh),
                                             tfla_tk::operand(h),
                                             row_factors(rows, factors, eps),
                                             sizes[0],
                                             sizes[1],
                                             sizes[2],
                                             sizes[3],
                                             sizes[4],
                                             half,
                                             device};
    return prepared<&tfla_tk::mlstm_bwd_rows>(params);
}

Launch mlstm_bwd_factors(const DotsTuple& dots, const Pair& rows, const FactorsTuple& factors,
                         std::int64_t count, float eps, int device) {
    const tfla_tk::MlstmBwdFactorsParams params{pointer(dots[0]),
                                                dots[1],
                                                static_cast<int>(dots[2]),
                                                static_cast<int>(dots[3]),
                                                row_factors(rows, factors, eps),
                                                count,
                                                device};
    return prepared<&tfla_tk::mlstm_bwd_factors>(params);
}

Launch mlstm_bwd_combine(const tfla_tk::BoundariesTuple& boundaries, int norm_parts, const Pair& entering,
                         const tfla_tk::CutTuple& cut, const std::array<int, 4>& sizes, bool backward,
                         int device) {
    const tfla_tk::MlstmBwdCombineParams params{tfla_tk::boundaries(boundaries),
                                                norm_parts,
                                                pointer(entering[0]),
                                                pointer(entering[1]),
                                                tfla_tk::cut(cut),
                                                sizes[0],
                                                sizes[1],
                                                sizes[2],
                                                sizes[3],
                                                backward,
                                                device};
    return prepared<&tfla_tk::mlstm_bwd_combine>(params);
}

Launch mlstm_bwd_gates(const RowSumsTuple& q_dq, const RowSumsTuple& k_dk, const AnchorsTuple& anchors,
                       const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f, const tfla_tk::GateTuple& di,
                       const tfla_tk::GateTuple& df, std::int64_t chunk_m, const StateTuple& initial,
                       const StateTuple& last, std::int64_t workspace, const OffsetsTuple& offsets,
                       const std::array<int, 5>& sizes, bool sigmoid_gate, int device) {
    const tfla_tk::MlstmBwdGatesParams params{row_sums(q_dq),
                                              row_sums(k_dk),
                                              anchors_of(anchors),
                                              tfla_tk::gate(i),
                                              tfla_tk::gate(f),
                                              gate_gradient(di),
                                              gate_gradient(df),
                                              pointer(chunk_m),
                                              state(initial),
                                              state(last),
                                              reinterpret_cast<void*>(workspace),
                                              offsets_of(offsets),
                                              sizes[0],
                                              sizes[1],
                                              sizes[2],
                                              sizes[3],
                                              sizes[4],
                                              sigmoid_gate,
                                              device};
    return prepared<&tfla_tk::mlstm_bwd_gates>(params);
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    tfla_tk::export_layout(m);
    tfla_tk::export_launches(m);
    m.def(
        "mlstm_bwd_scan", &mlstm_bwd_scan, py::arg("i"), py::arg("f"), py::arg("rows"), py::arg("chunk_m"),
        py::arg("gates"), py::arg("tickets"), py::arg("offsets"), py::arg("sizes"), py::arg("eps"),
        py::arg("scale"), py::arg("sigmoid_gate"), py::arg("device"),
        "Prepares the gates of every chunk as the passes take them. rows: row_n, row_m; tickets: pointer to "
        "two ints or 0; sizes: batch, heads, seq.");
    m.def("chunk_gates_bytes", &tfla_tk::chunk_gates_bytes, "Bytes of one chunk's.");
    m.def(
        "mlstm_bwd_rows", &mlstm_bwd_rows, py::arg("dh"), py::arg("h"), py::arg("rows"), py::arg("factors"),
        py::arg("sizes"), py::arg("eps"), py::arg("half"), py::arg("device"),
        "Prepares log2 w and e of every row. rows: row_n, row_m; factors: log2_w, e, e_stride; sizes: batch, "
        "heads, seq, dim_v, columns of a part of V.");
    m.def(
        "mlstm_bwd_factors", &mlstm_bwd_factors, py::arg("dots"), py::arg("rows"), py::arg("factors"),
        py::arg("count"), py::arg("eps"), py::arg("device"),
        "Prepares e of every row, from dh.h as the pass for dv leaves it. dots: pointer, stride "
        "and number of its slices, slices of a part of V; rows, factors: as in mlstm_bwd_rows; count: of the "
        "rows.");
    m.def("mlstm_bwd_combine", &mlstm_bwd_combine, py::arg("boundaries"), py::arg("norm_parts"),
          py::arg("entering"), py::arg("cut"), py::arg("sizes"), py::arg("backward"), py::arg("device"),
          "Prepares what arrives at the boundaries between segments. boundaries: c, n, log2_decay; sizes: "
          "heads, seq, dim_qk, dim_v.");
    m.def("mlstm_bwd_gates", &mlstm_bwd_gates, py::arg("q_dq"), py::arg("k_dk"), py::arg("anchors"),
          py::arg("i"), py::arg("f"), py::arg("di"), py::arg("df"), py::arg("chunk_m"), py::arg("initial"),
          py::arg("last"), py::arg("workspace"), py::arg("offsets"), py::arg("sizes"),
          py::arg("sigmoid_gate"), py::arg("device"),
          "Prepares the gradients of the gates. sizes: batch, heads, seq, dim_qk, dim_v.");
    m.def("mlstm_bwd_gates_workspace_bytes", &tfla_tk::mlstm_bwd_gates_workspace_bytes, py::arg("heads"),
          py::arg("sequences"), "Bytes of the workspace of mlstm_bwd_gates.");
}
