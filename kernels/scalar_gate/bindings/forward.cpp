// pybind11 module of one instance of the forward. Arguments are integers: pointers, strides, sizes, the
// stream. No Torch header.
#include "scalar_gate/bindings/tuples.h"

namespace {

using tfla_tk::pointer;

using Strides = std::array<std::int64_t, 3>;     // of batch, head and row, in elements
using GateLayout = std::array<std::int64_t, 4>;  // the same, and the DType
using CutLayout = std::array<int, 4>;            // whether offsets are 64-bit, sequences, segments, chunks
using StateTuple = std::array<std::int64_t, 3>;  // pointers to c, n, m; 0 where there is none
using RowsTuple = std::array<std::int64_t, 3>;   // pointers to row_n, row_m, chunk_m; 0 where there is none

tfla_tk::Operand operand(const Strides& x) { return {nullptr, x[0], x[1], x[2]}; }
tfla_tk::Gate gate(const GateLayout& x) {
    return {nullptr, x[0], x[1], x[2], static_cast<tfla_tk::DType>(x[3])};
}
tfla_tk::Cut cut(const CutLayout& x) { return {nullptr, x[0] != 0, x[1], x[2], x[3]}; }
tfla_tk::State state(const StateTuple& x) { return {pointer(x[0]), pointer(x[1]), pointer(x[2])}; }

// The parameters, without addresses, of all calls whose tensors have the same shapes, strides and types. A
// call passes the addresses.
class Forward {
  public:
    Forward(const Strides& q, const Strides& k, const Strides& v, const Strides& h, const GateLayout& i,
            const GateLayout& f, const CutLayout& cut_of_sequences, const std::array<int, 5>& sizes,
            int group, float scale, float eps, bool half, bool sigmoid_gate, bool normalize, int device)
        : params{
              {operand(k), operand(v), gate(i), gate(f), state({}), nullptr, cut(cut_of_sequences), sizes[0],
               sizes[1], sizes[2], sizes[3], sizes[4], group, half, sigmoid_gate, normalize, device},
              operand(q),
              operand(h),
              state({}),
              nullptr,
              nullptr,
              nullptr,
              scale,
              eps} {}

    void launch(std::int64_t q, std::int64_t k, std::int64_t v, std::int64_t h, std::int64_t i,
                std::int64_t f, const StateTuple& initial, const StateTuple& last, const RowsTuple& rows,
                std::int64_t offsets, std::int64_t workspace, std::uintptr_t stream) const {
        tfla_tk::MlstmFwdParams p = params;
        tfla_tk::MlstmFwdWalk& walk = p.walk;
        p.q.data = pointer(q), walk.k.data = pointer(k), walk.v.data = pointer(v), p.h.data = pointer(h);
        walk.i.data = pointer(i), walk.f.data = pointer(f);
        walk.initial = state(initial), p.last = state(last);
        p.row_n = pointer(rows[0]), p.row_m = pointer(rows[1]), p.chunk_m = pointer(rows[2]);
        walk.cut.offsets = pointer(offsets), walk.workspace = pointer(workspace);
        auto* const on = reinterpret_cast<void*>(stream);
        if (walk.cut.segments > walk.cut.sequences) tfla_tk::mlstm_fwd_states(walk, on);
        tfla_tk::mlstm_fwd(p, on);
    }

  private:
    tfla_tk::MlstmFwdParams params;
};

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    // module_local: every instance's module defines one
    py::class_<Forward>(m, "Forward", py::module_local(),
                        "The mLSTM forward of calls whose tensors lie alike.")
        .def(py::init<const Strides&, const Strides&, const Strides&, const Strides&, const GateLayout&,
                      const GateLayout&, const CutLayout&, const std::array<int, 5>&, int, float, float, bool,
                      bool, bool, int>(),
             py::arg("q"), py::arg("k"), py::arg("v"), py::arg("h"), py::arg("i"), py::arg("f"),
             py::arg("cut"), py::arg("sizes"), py::arg("group"), py::arg("scale"), py::arg("eps"),
             py::arg("half"), py::arg("sigmoid_gate"), py::arg("normalize"), py::arg("device"),
             "Strides in elements; sizes: batch, heads, seq, dim_qk, dim_v; group: heads that share one of q "
             "and "
             "k.")
        .def("launch", &Forward::launch, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("h"), py::arg("i"),
             py::arg("f"), py::arg("initial"), py::arg("last"), py::arg("rows"), py::arg("offsets"),
             py::arg("workspace"), py::arg("stream"),
             "Launches one kernel on a stream, or three where sequences are cut.",
             py::call_guard<py::gil_scoped_release>());
    tfla_tk::export_layout(m);
    m.def(
        "workspace_offsets",
        [](std::int64_t slots, int dim_qk, int dim_v) {
            return tfla_tk::mlstm_fwd_workspace_offsets(slots, dim_qk, dim_v);
        },
        py::arg("slots"), py::arg("dim_qk"), py::arg("dim_v"),
        "Bytes from the start of a workspace to the states c and n at the cuts.");
    m.attr("CTAS_PER_MULTIPROCESSOR") = tfla_tk::mlstm_fwd_ctas_per_multiprocessor();
    m.def("mlstm_fwd_workspace_bytes", &tfla_tk::mlstm_fwd_workspace_bytes, py::arg("slots"),
          py::arg("dim_qk"), py::arg("dim_v"), "Bytes of the workspace of a call whose sequences are cut.");
}
