// pybind11 module of one instance of GLA's forward. Its function prepares a launch. Arguments are integers:
// prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/walk.h"

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    using namespace tfla_tk;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("forward", &prepared_walk<&gla_forward>, py::arg("shape"), py::arg("q"), py::arg("k"), py::arg("v"),
          py::arg("o"), py::arg("g"), py::arg("g_dtype"), py::arg("initial"), py::arg("last"),
          py::arg("scale"), py::arg("walkers"), py::arg("borders"), py::arg("slice_of_k"),
          "Prepares the forward; initial, last and borders with address 0: zero, not wanted, no cut; "
          "slice_of_k: None where all of K is, else channels of the others, address of the part, whether it "
          "is the first one, the last one.");
    export_part_bytes(m);
}
