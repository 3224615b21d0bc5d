// pybind11 module of one instance of the walks for the gradients of q and k. Its functions prepare launches.
// Arguments are integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "delta_rule/bindings/params_states.h"
#include "delta_rule/bindings/tuples.h"

namespace tfla_tk {

void place(DeltaStatesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.writes, x.dout, x.dv, x.dq, x.left, x.dk, x.right);
    at.all(x.g, x.beta, x.entering, x.leaving, x.borders, x.whole, x.inter, x.anchors, x.flows, x.written,
           x.low);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

// addresses of the sums per token and per chunk, of the anchors and the flows; all 0: not wanted
using SumsTuple = std::array<std::int64_t, 4>;

template <void (*kWalk)(const DeltaStatesParams&, void*)>
void def_walk(pybind11::module_& m, const char* name) {
    namespace py = pybind11;
    m.def(
        name,
        [](const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const OperandTuple& writes,
           const OperandTuple& dout, const OperandTuple& dv, const OperandTuple& dq, const OperandTuple& left,
           const OperandTuple& dk, const OperandTuple& right, const GateTuple& g, const GateTuple& beta,
           std::int64_t entering, std::int64_t leaving, std::int64_t borders, const SumsTuple& sums,
           std::int64_t written, std::int64_t low, float scale, int walkers, int shared) {
            return prepared<kWalk>(DeltaStatesParams{shape(of),
                                                     operand(q),
                                                     operand(k),
                                                     operand(writes),
                                                     operand(dout),
                                                     operand(dv),
                                                     operand(dq),
                                                     operand(left),
                                                     operand(dk),
                                                     operand(right),
                                                     gate(g),
                                                     gate(beta),
                                                     pointer(entering),
                                                     pointer(leaving),
                                                     pointer(borders),
                                                     pointer(sums[0]),
                                                     reinterpret_cast<FlowSum*>(sums[1]),
                                                     pointer(sums[2]),
                                                     pointer(sums[3]),
                                                     reinterpret_cast<int*>(written),
                                                     pointer(low),
                                                     scale,
                                                     walkers,
                                                     shared});
        },
        py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("writes"), py::arg("dout"), py::arg("dv"),
        py::arg("dq"), py::arg("left"), py::arg("dk"), py::arg("right"), py::arg("g"), py::arg("beta"),
        py::arg("entering"), py::arg("leaving"), py::arg("borders"), py::arg("sums"), py::arg("written"),
        py::arg("low"), py::arg("scale"), py::arg("walkers"), py::arg("shared"),
        "Prepares a walk; right: the right parts of dk, address 0 where the mirror does not make them; "
        "entering, leaving: the states that sequences begin and end with, borders: those of "
        "the segments between, 0 for none; sums: whole, "
        "inter, anchors, flows; written, low: workspaces of written_bytes and low_bytes; shared: heads of v "
        "that share a head of the results.");
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_constants(m);
    export_launches(m);
    m.attr("DELTA_ANCHOR_CHUNKS") = kDeltaAnchorChunks;
    def_walk<&delta_left>(m, "left");
    def_walk<&delta_right>(m, "right");
    m.def(
        "anchor_bytes", [](const ShapeTuple& of) { return delta_anchor_bytes(shape(of)); }, py::arg("shape"),
        "Bytes of the states that a walk leaves at the anchors.");
    m.def(
        "written_bytes",
        [](const ShapeTuple& of, int shared) { return delta_written_bytes(shape(of), shared); },
        py::arg("shape"), py::arg("shared"),
        "Bytes of the workspace by which heads of v and slices of V take turns; 0 where none share a "
        "result.");
    m.def(
        "low_bytes", [](const ShapeTuple& of, int shared) { return delta_low_bytes(shape(of), shared); },
        py::arg("shape"), py::arg("shared"),
        "Bytes of the workspace for the low bytes of what slices of V leave for each other; 0 for one "
        "slice.");
}
