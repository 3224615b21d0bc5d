// pybind11 module of one instance of the delta rule's forward. Arguments are integers: pointers, strides,
// sizes, the stream. No Torch header.
#include "delta_rule/bindings/tuples.h"

namespace {

using namespace tfla_tk;

void matrices(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const GateTuple& g,
              const GateTuple& beta, const MatricesTuple& to, float scale, std::uintptr_t stream) {
    delta_matrices({shape(of), operand(q), operand(k), gate(g), gate(beta), pointer(to[0]), pointer(to[1]), scale,
                    false},
                   reinterpret_cast<void*>(stream));
}

void forward(const ShapeTuple& of, const OperandTuple& q, const OperandTuple& k, const OperandTuple& v,
             const OperandTuple& o, const OperandTuple& writes, const GateTuple& g, const GateTuple& beta,
             const MatricesTuple& from, std::int64_t initial, std::int64_t last, float scale, int walkers,
             std::uintptr_t stream) {
    delta_forward({shape(of), operand(q), operand(k), operand(v), operand(o), operand(writes), gate(g), gate(beta),
                   pointer(from[0]), pointer(from[1]), pointer(initial), pointer(last), scale, walkers},
                  reinterpret_cast<void*>(stream));
}

}  // namespace

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    m.def("matrices", &matrices, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("g"), py::arg("beta"),
          py::arg("matrices"), py::arg("scale"), py::arg("stream"),
          "Makes A and P of every chunk, as the walk of the forward takes them.",
          py::call_guard<py::gil_scoped_release>());
    m.def("forward", &forward, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"),
          py::arg("writes"), py::arg("g"), py::arg("beta"), py::arg("matrices"), py::arg("initial"),
          py::arg("last"), py::arg("scale"), py::arg("walkers"), py::arg("stream"),
          "Walks over the chunks; writes with address 0: not wanted.",
          py::call_guard<py::gil_scoped_release>());
    export_chunk_and_dtypes(m);
}
