// pybind11 module of one instance of the walks of GLA's backward over the states. Its functions prepare
// launches. Arguments are integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch
// header.
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/tuples.h"

namespace tfla_tk {

void place(GlaStatesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.dout, x.g, x.result, x.inflow, x.dg);
    at.all(x.entering, x.d_last, x.borders, x.d_borders, x.flows, x.anchors, x.sums);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

// inflow, dg, and addresses of d_last, flows and anchors; looked at if dg is needed
using GatesTuple = std::tuple<OperandTuple, OperandTuple, std::array<std::int64_t, 3>>;

// of a slice of V: columns of the others, address of the sums, whether it is the first one, the last one
using SliceTuple = std::tuple<int, std::int64_t, bool, bool>;

template <void (*kWalk)(const GlaStatesParams&, void*)>
void def_walk(pybind11::module_& m, const char* name) {
    namespace py = pybind11;
    m.def(
        name,
        [](const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const OperandTuple& v,
           const OperandTuple& dout, const OperandTuple& g, int g_dtype, const OperandTuple& result,
           const std::optional<GatesTuple>& gates, std::int64_t entering, float scale, int walkers,
           const std::array<std::int64_t, 2>& borders, const std::optional<SliceTuple>& slice) {
            GlaStatesParams x{shape(of), operand(q), operand(k), operand(v), operand(dout), operand(g)};
            x.g_dtype = static_cast<DType>(g_dtype), x.result = operand(result);
            x.entering = pointer(entering), x.scale = scale, x.walkers = walkers;
            x.borders = pointer(borders[0]), x.d_borders = pointer(borders[1]);
            x.needs_dg = gates.has_value();
            const auto [others, sums, is_first, is_last] = slice.value_or(SliceTuple{0, 0, true, true});
            x.other_dim_v = others, x.sums = pointer(sums), x.is_first = is_first, x.is_last = is_last;
            if (gates) {
                const auto& [inflow, dg, of_flow] = *gates;
                x.inflow = operand(inflow), x.dg = operand(dg);
                x.d_last = pointer(of_flow[0]), x.flows = pointer(of_flow[1]),
                x.anchors = pointer(of_flow[2]);
            }
            return prepared<kWalk>(x);
        },
        py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("dout"), py::arg("g"),
        py::arg("g_dtype"), py::arg("result"), py::arg("gates"), py::arg("entering"), py::arg("scale"),
        py::arg("walkers"), py::arg("borders"), py::arg("slice"),
        "Prepares a walk; gates: None, or inflow, dg, and the addresses of d_last, flows and anchors; "
        "borders: the states at these and their gradients; entering, d_last, flows, borders: 0 for none; "
        "slice: None where all of V is, else columns of the others, address of the sums, whether it is the "
        "first one, the last one.");
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.attr("ANCHOR_CHUNKS") = kAnchorChunks;
    def_walk<&gla_left>(m, "left");
    def_walk<&gla_right>(m, "right");
    m.def(
        "anchor_bytes", [](const ShapeTuple& of) { return gla_anchor_bytes(shape(of)); }, py::arg("shape"),
        "Bytes of the states that the walk \"left\" leaves at the anchors, of a slice of V.");
    m.def(
        "sums_bytes", [](const ShapeTuple& of) { return gla_sums_bytes(shape(of)); }, py::arg("shape"),
        "Bytes of what a walk hands from slice to slice of V.");
}
