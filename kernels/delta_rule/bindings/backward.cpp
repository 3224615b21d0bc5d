// pybind11 module of one instance of the delta rule's backward. Arguments are integers: pointers, strides,
// sizes, the stream. No Torch header.
#include "delta_rule/bindings/tuples.h"

namespace {

using namespace tfla_tk;

using Pair = std::array<std::int64_t, 2>;  // pointers to the gradients of the last and of the initial state, or 0

void matrices(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const GateTuple& g,
              const GateTuple& beta, const MatricesTuple& to, float scale, std::uintptr_t stream) {
    delta_matrices({shape(of), operand(q), operand(k), gate(g), gate(beta), pointer(to[0]), pointer(to[1]), scale,
                    true},
                   reinterpret_cast<void*>(stream));
}

void mirror(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const OperandTuple& dout,
            const OperandTuple& writes, const OperandTuple& dv, const OperandTuple& u, const GateTuple& g,
            const GateTuple& beta, const MatricesTuple& from, std::int64_t dbeta, const Pair& states,
            float scale, int walkers, std::uintptr_t stream) {
    delta_mirror({shape(of), operand(q), operand(k), operand(dout), operand(writes), operand(dv), operand(u),
                  gate(g), gate(beta), pointer(from[0]), pointer(from[1]), pointer(dbeta), pointer(states[0]),
                  pointer(states[1]), scale, walkers},
                 reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    m.def("matrices", &matrices, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("g"), py::arg("beta"),
          py::arg("matrices"), py::arg("scale"), py::arg("stream"),
          "Makes A and P of every chunk, as the mirror walk takes them.",
          py::call_guard<py::gil_scoped_release>());
    m.def("mirror", &mirror, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("dout"), py::arg("writes"),
          py::arg("dv"), py::arg("u"), py::arg("g"), py::arg("beta"), py::arg("matrices"), py::arg("dbeta"),
          py::arg("states"), py::arg("scale"), py::arg("walkers"), py::arg("stream"),
          "Walks over the chunks from the last one to the first.", py::call_guard<py::gil_scoped_release>());
    export_chunk_and_dtypes(m);
}
