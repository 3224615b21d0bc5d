// pybind11 module of one instance of the delta rule's forward. Its functions prepare launches. Arguments are
// integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "delta_rule/bindings/params_inputs.h"
#include "delta_rule/bindings/tuples.h"

namespace tfla_tk {

void place(DeltaMatricesParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.g, x.beta, x.a, x.p, x.bounds);
}

void place(DeltaLeadsParams& x, const Addresses& at) { at.all(x.shape.cut.offsets, x.bounds, x.leads); }

void place(DeltaForwardParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.v, x.o, x.writes, x.g, x.beta, x.a, x.p, x.initial, x.last);
    at.all(x.carried, x.leads, x.borders, x.made);
}

void place(DeltaMapsParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.k, x.v, x.g, x.beta, x.a, x.initial, x.carried, x.leads, x.maps,
           x.transposed);
}

void place(DeltaInputsParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.unit_q, x.unit_k, x.beta, x.g, x.a_log, x.dt_bias, x.strength, x.log_decay);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

using MatricesTuple = std::array<std::int64_t, 3>;  // addresses of A, P and the flags of makers, 0 for none

std::unique_ptr<Launch> matrices(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                 const GateTuple& g, const GateTuple& beta, const Pair& matrices, float scale,
                                 std::int64_t bounds) {
    return prepared<&delta_matrices>(
        DeltaMatricesParams{shape(of), operand(q), operand(k), gate(g), gate(beta), pointer(matrices[0]),
                            pointer(matrices[1]), scale, reinterpret_cast<ChunkBounds*>(bounds)});
}

std::unique_ptr<Launch> leads(const ShapeTuple& of, std::int64_t bounds, std::int64_t leads, int longest,
                              bool both) {
    return prepared<&delta_leads>(DeltaLeadsParams{shape(of), reinterpret_cast<ChunkBounds*>(bounds),
                                                   reinterpret_cast<int*>(leads), longest, both});
}

std::unique_ptr<Launch> forward(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                const OperandTuple& v, const OperandTuple& o, const OperandTuple& writes,
                                const GateTuple& g, const GateTuple& beta, const MatricesTuple& matrices,
                                std::int64_t initial, std::int64_t last, std::int64_t carried,
                                std::int64_t leads, std::int64_t borders, float scale, int walkers,
                                int makers, bool makes_matrices) {
    return prepared<&delta_forward>(DeltaForwardParams{shape(of),
                                                       operand(q),
                                                       operand(k),
                                                       operand(v),
                                                       operand(o),
                                                       operand(writes),
                                                       gate(g),
                                                       gate(beta),
                                                       pointer(matrices[0]),
                                                       pointer(matrices[1]),
                                                       pointer(initial),
                                                       pointer(last),
                                                       pointer(carried),
                                                       reinterpret_cast<int*>(leads),
                                                       pointer(borders),
                                                       scale,
                                                       walkers,
                                                       makers,
                                                       reinterpret_cast<int*>(matrices[2]),
                                                       makes_matrices});
}

std::unique_ptr<Launch> maps(const ShapeTuple& of, const OperandTuple& k, const OperandTuple& v,
                             const GateTuple& g, const GateTuple& beta, std::int64_t a, std::int64_t initial,
                             std::int64_t carried, std::int64_t leads, const Pair& maps) {
    return prepared<&delta_maps>(
        DeltaMapsParams{shape(of), operand(k), operand(v), gate(g), gate(beta), pointer(a), pointer(initial),
                        pointer(carried), reinterpret_cast<int*>(leads), pointer(maps[0]), pointer(maps[1])});
}

std::unique_ptr<Launch> inputs(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                               const OperandTuple& unit_q, const OperandTuple& unit_k, const GateTuple& beta,
                               const GateTuple& g, const GateTuple& a_log, const GateTuple& dt_bias,
                               std::int64_t strength, std::int64_t log_decay, bool twice) {
    return prepared<&delta_inputs>(
        DeltaInputsParams{shape(of), operand(q), operand(k), operand(unit_q), operand(unit_k), gate(beta),
                          gate(g), gate(a_log), gate(dt_bias), pointer(strength), pointer(log_decay), twice});
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_constants(m);
    export_launches(m);
    m.def("matrices", &matrices, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("g"), py::arg("beta"),
          py::arg("matrices"), py::arg("scale"), py::arg("bounds"),
          "Prepares A of every chunk, and P and the bounds where their addresses are not 0.");
    m.def("leads", &leads, py::arg("shape"), py::arg("bounds"), py::arg("leads"), py::arg("longest"),
          py::arg("both"),
          "Prepares the leads of a split's segments, int32 [2, segments, heads], from the bounds; both: "
          "else only those before the segments.");
    m.def("forward", &forward, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"),
          py::arg("writes"), py::arg("g"), py::arg("beta"), py::arg("matrices"), py::arg("initial"),
          py::arg("last"), py::arg("carried"), py::arg("leads"), py::arg("borders"), py::arg("scale"),
          py::arg("walkers"), py::arg("makers"), py::arg("makes_matrices"),
          "Prepares the walk over the chunks; writes, initial, last and borders with address 0: not wanted, "
          "zero; carried, leads: 0 but for the one that a split has.");
    m.def("maps", &maps, py::arg("shape"), py::arg("k"), py::arg("v"), py::arg("g"), py::arg("beta"),
          py::arg("a"), py::arg("initial"), py::arg("carried"), py::arg("leads"), py::arg("maps"),
          "Prepares the walks that give what segments of carried heads make of the state; maps: M, 0: "
          "not wanted, and M transposed.");
    def_carry<false>(m);
    m.def("inputs", &inputs, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("unit_q"),
          py::arg("unit_k"), py::arg("beta"), py::arg("g"), py::arg("a_log"), py::arg("dt_bias"),
          py::arg("strength"), py::arg("log_decay"), py::arg("twice"),
          "Prepares what makes the inputs of raw ones; address 0: not to be made.");
}
