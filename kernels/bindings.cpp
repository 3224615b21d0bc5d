// pybind11 module of one kernel instance: integers in, launches out. No Torch header: pointers, strides,
// stream.
#include "tfla_tk/binding_types.h"

namespace {

using tfla_tk::pointer;

using StateTuple = std::array<std::int64_t, 3>;  // pointers to c, n, m; 0 where there is none
using RowsTuple = std::array<std::int64_t, 3>;   // pointers to row_n, row_m, chunk_m; 0 where there is none

tfla_tk::State state(const StateTuple& x) { return {pointer(x[0]), pointer(x[1]), pointer(x[2])}; }

tfla_tk::MlstmFwdWalk walk(const tfla_tk::OperandTuple& k, const tfla_tk::OperandTuple& v,
                           const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f,
                           const StateTuple& initial, const tfla_tk::CutTuple& cut, std::int64_t workspace,
                           const std::array<int, 5>& sizes, bool half, bool sigmoid_gate, bool normalize,
                           int device) {
    return {tfla_tk::operand(k),
            tfla_tk::operand(v),
            tfla_tk::gate(i),
            tfla_tk::gate(f),
            state(initial),
            reinterpret_cast<void*>(workspace),
            tfla_tk::cut(cut),
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            sizes[4],
            half,
            sigmoid_gate,
            normalize,
            device};
}

void mlstm_fwd_states(const tfla_tk::OperandTuple& k, const tfla_tk::OperandTuple& v,
                      const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f, const StateTuple& initial,
                      const tfla_tk::CutTuple& cut, std::int64_t workspace, const std::array<int, 5>& sizes,
                      bool half, bool sigmoid_gate, bool normalize, int device, std::uintptr_t stream) {
    tfla_tk::mlstm_fwd_states(
        walk(k, v, i, f, initial, cut, workspace, sizes, half, sigmoid_gate, normalize, device),
        reinterpret_cast<void*>(stream));
}

void mlstm_fwd(const tfla_tk::OperandTuple& q, const tfla_tk::OperandTuple& k, const tfla_tk::OperandTuple& v,
               const tfla_tk::OperandTuple& h, const tfla_tk::GateTuple& i, const tfla_tk::GateTuple& f,
               const StateTuple& initial, const StateTuple& last, const RowsTuple& rows,
               const tfla_tk::CutTuple& cut, std::int64_t workspace, const std::array<int, 5>& sizes,
               float scale, float eps, bool half, bool sigmoid_gate, bool normalize, int device,
               std::uintptr_t stream) {
    const tfla_tk::MlstmFwdParams params{
        walk(k, v, i, f, initial, cut, workspace, sizes, half, sigmoid_gate, normalize, device),
        tfla_tk::operand(q),
        tfla_tk::operand(h),
        state(last),
        pointer(rows[0]),
        pointer(rows[1]),
        pointer(rows[2]),
        scale,
        eps};
    tfla_tk::mlstm_fwd(params, reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    m.def("mlstm_fwd", &mlstm_fwd, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("h"), py::arg("i"),
          py::arg("f"), py::arg("initial"), py::arg("last"), py::arg("rows"), py::arg("cut"),
          py::arg("workspace"), py::arg("sizes"), py::arg("scale"), py::arg("eps"), py::arg("half"),
          py::arg("sigmoid_gate"), py::arg("normalize"), py::arg("device"), py::arg("stream"),
          "Launches the mLSTM forward on a stream. sizes: batch, heads, seq, dim_qk, dim_v.");
    m.def("mlstm_fwd_states", &mlstm_fwd_states, py::arg("k"), py::arg("v"), py::arg("i"), py::arg("f"),
          py::arg("initial"), py::arg("cut"), py::arg("workspace"), py::arg("sizes"), py::arg("half"),
          py::arg("sigmoid_gate"), py::arg("normalize"), py::arg("device"), py::arg("stream"),
          "Launches what comes before mlstm_fwd where sequences are cut; as there.");
    m.attr("CTAS_PER_MULTIPROCESSOR") = tfla_tk::mlstm_fwd_ctas_per_multiprocessor();
    m.def("mlstm_fwd_workspace_bytes", &tfla_tk::mlstm_fwd_workspace_bytes, py::arg("slots"),
          py::arg("dim_qk"), py::arg("dim_v"), "Bytes of the workspace of a call whose sequences are cut.");
}
