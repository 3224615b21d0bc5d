// pybind11 module of one instance of the mirror walk of GLA's backward. Its function prepares a launch.
// Arguments are integers: prepared addresses (prepared_launches.h), strides, sizes. No Torch header.
#include "channel_gate/bindings/params_backward.h"
#include "channel_gate/bindings/walk.h"

PYBIND11_MODULE(TFLA_MODULE, m) {
    namespace py = pybind11;
    using namespace tfla_tk;
    export_chunk_and_dtypes(m);
    export_launches(m);
    m.def("mirror", &prepared_walk<&gla_mirror>, py::arg("shape"), py::arg("q"), py::arg("k"),
          py::arg("dout"), py::arg("dv"), py::arg("g"), py::arg("g_dtype"), py::arg("d_last"),
          py::arg("d_initial"), py::arg("scale"), py::arg("walkers"), py::arg("borders"),
          py::arg("slice_of_k"),
          "Prepares the walk from the last chunk to the first; d_last, d_initial and borders: 0 for none; "
          "slice_of_k as the forward's.");
    export_part_bytes(m);
}
