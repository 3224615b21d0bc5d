// pybind11 module of one instance of the delta rule's backward. Its functions prepare launches. Arguments are
// integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "delta_rule/bindings/params_inputs.h"
#include "delta_rule/bindings/tuples.h"

namespace tfla_tk {

void place(DeltaMirrorParams& x, const Addresses& at) {
    at.all(x.shape.cut.offsets, x.q, x.k, x.dout, x.writes, x.dv, x.g, x.beta, x.a, x.p);
    at.all(x.dbeta, x.d_last, x.d_initial, x.carried, x.leads, x.borders);
    at.all(x.right.dk, x.right.whole, x.right.inter, x.right.anchors);
}

void place(DeltaCombineParams& x, const Addresses& at) { at.all(x.dq_parts, x.dk_parts, x.dq, x.dk); }

void place(DeltaStrengthParams& x, const Addresses& at) { at.all(x.sums, x.dbeta); }

void place(DeltaInputsBackwardParams& x, const Addresses& at) {
    at.all(x.q, x.k, x.dq, x.dk, x.beta, x.g, x.a_log, x.dt_bias, x.d_strength, x.d_log_decay);
    at.all(x.d_beta, x.d_g, x.sums);
}

}  // namespace tfla_tk

namespace {

using namespace tfla_tk;

std::unique_ptr<Launch> mirror(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                               const OperandTuple& dout, const OperandTuple& writes, const OperandTuple& dv,
                               const GateTuple& g, const GateTuple& beta, const Pair& matrices,
                               std::int64_t dbeta, std::int64_t d_last, std::int64_t d_initial,
                               std::int64_t carried, std::int64_t leads, std::int64_t borders, float scale,
                               int walkers, bool states_alone, const OperandTuple& right_dk,
                               const std::array<std::int64_t, 3>& right_sums) {
    return prepared<&delta_mirror>(
        DeltaMirrorParams{shape(of),
                          operand(q),
                          operand(k),
                          operand(dout),
                          operand(writes),
                          operand(dv),
                          gate(g),
                          gate(beta),
                          pointer(matrices[0]),
                          pointer(matrices[1]),
                          pointer(dbeta),
                          pointer(d_last),
                          pointer(d_initial),
                          pointer(carried),
                          reinterpret_cast<int*>(leads),
                          pointer(borders),
                          scale,
                          walkers,
                          states_alone,
                          RightPart{operand(right_dk), pointer(right_sums[0]),
                                    reinterpret_cast<FlowSum*>(right_sums[1]), pointer(right_sums[2])}});
}

std::unique_ptr<Launch> combine(const ShapeTuple& of, const OperandTuple& dq_parts,
                                const OperandTuple& dk_parts, const OperandTuple& dq,
                                const OperandTuple& dk) {
    return prepared<&delta_combine>(
        DeltaCombineParams{operand(dq_parts), operand(dk_parts), operand(dq), operand(dk), shape(of)});
}

std::unique_ptr<Launch> strength(const ShapeTuple& of, std::int64_t sums, int parts, const GateTuple& dbeta) {
    return prepared<&delta_strength>(DeltaStrengthParams{shape(of), pointer(sums), parts, gate(dbeta)});
}

std::unique_ptr<Launch> inputs_backward(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k,
                                        const OperandTuple& dq, const OperandTuple& dk, const GateTuple& beta,
                                        const GateTuple& g, const GateTuple& a_log, const GateTuple& dt_bias,
                                        std::int64_t d_strength, std::int64_t d_log_decay,
                                        const GateTuple& d_beta, const GateTuple& d_g, std::int64_t sums,
                                        bool twice) {
    return prepared<&delta_inputs_backward>(
        DeltaInputsBackwardParams{shape(of), operand(q), operand(k), operand(dq), operand(dk), gate(beta),
                                  gate(g), gate(a_log), gate(dt_bias), pointer(d_strength),
                                  pointer(d_log_decay), gate(d_beta), gate(d_g), pointer(sums), twice});
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    export_constants(m);
    export_launches(m);
    m.def("mirror", &mirror, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("dout"), py::arg("writes"),
          py::arg("dv"), py::arg("g"), py::arg("beta"), py::arg("matrices"), py::arg("dbeta"),
          py::arg("d_last"), py::arg("d_initial"), py::arg("carried"), py::arg("leads"), py::arg("borders"),
          py::arg("scale"), py::arg("walkers"), py::arg("states_alone"), py::arg("right_dk"),
          py::arg("right_sums"),
          "Prepares the walk from the last chunk to the first; d_last, d_initial and borders: 0 for none; "
          "carried, leads: 0 but for the one that a split has; states_alone: it leaves those alone; "
          "right_dk: the right parts of dk, address 0 where it does not make them; "
          "right_sums: whole, inter, anchors, 0 for none.");
    def_carry<true>(m);
    m.def("combine", &combine, py::arg("shape"), py::arg("dq_parts"), py::arg("dk_parts"), py::arg("dq"),
          py::arg("dk"), "Prepares the sums of the parts of dq and dk.");
    m.def("strength", &strength, py::arg("shape"), py::arg("sums"), py::arg("parts"), py::arg("dbeta"),
          "Prepares dbeta of the sums that the walk leaves, in so many parts.");
    m.attr("INPUT_TOKENS") = kInputTokens;
    m.def("inputs_backward", &inputs_backward, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("dq"),
          py::arg("dk"), py::arg("beta"), py::arg("g"), py::arg("a_log"), py::arg("dt_bias"),
          py::arg("d_strength"), py::arg("d_log_decay"), py::arg("d_beta"), py::arg("d_g"), py::arg("sums"),
          py::arg("twice"),
          "Prepares what makes the gradients of raw inputs, those of q and k in place; address 0: not made.");
}
