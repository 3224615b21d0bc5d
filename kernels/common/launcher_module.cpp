// The Python extension: it opens launchers, passes arguments to their functions and runs prepared launches.
// One serves all families.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/launcher.h"

namespace py = pybind11;

namespace tfla_tk {
namespace {

// Appends the numbers of nested tuples and lists.
void flatten(py::handle x, std::vector<Argument>& into) {
    if (PyTuple_Check(x.ptr()) || PyList_Check(x.ptr())) {
        const Py_ssize_t count = PySequence_Fast_GET_SIZE(x.ptr());
        for (Py_ssize_t n = 0; n < count; n++) flatten(PySequence_Fast_GET_ITEM(x.ptr(), n), into);
    } else if (PyFloat_Check(x.ptr())) {
        into.push_back({Argument::Kind::real, 0, PyFloat_AS_DOUBLE(x.ptr())});
    } else if (x.is_none()) {
        into.push_back({Argument::Kind::none, 0, 0.});
    } else {
        const std::int64_t integer = PyLong_AsLongLong(x.ptr());
        if (integer == -1 && PyErr_Occurred()) throw py::error_already_set();
        into.push_back({Argument::Kind::integer, integer, 0.});
    }
}

// A launch, and the library that it belongs to is never closed.
struct PreparedLaunch {
    std::unique_ptr<Launch> launch;
};

// Several launches of any launchers, one after the other.
class Launches {
  public:
    explicit Launches(const std::vector<const PreparedLaunch*>& prepared) {
        for (const PreparedLaunch* const x : prepared) launches.push_back(x->launch.get());
    }

    void run(const std::vector<std::int64_t>& starts, std::uintptr_t stream) const {
        const Addresses at(starts);
        for (const Launch* const launch : launches) launch->run(at, reinterpret_cast<void*>(stream));
    }

  private:
    std::vector<const Launch*> launches;
};

py::object call(const LauncherFunction& function, const py::args& arguments) {
    std::vector<Argument> flat;
    flat.reserve(64);
    flatten(arguments, flat);
    Arguments reader(function.name, flat);
    if (function.prepare) {
        auto launch = function.prepare(reader);
        reader.end();
        return py::cast(PreparedLaunch{std::move(launch)});
    }
    if (function.tell) {
        const auto told = function.tell(reader);
        reader.end();
        if (told.size() == 1) return py::int_(told[0]);
        return py::tuple(py::cast(told));
    }
    const py::gil_scoped_release release;
    function.run(reader);
    return py::none();
}

// A launcher's library.
class Library {
  public:
    explicit Library(const std::string& path) {
        void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) throw std::runtime_error(dlerror());
        launcher = symbol<decltype(&tfla_launcher)>(handle, "tfla_launcher")();
        load = symbol<decltype(&tfla_load_kernels)>(handle, "tfla_load_kernels");
    }

    py::dict functions() const {
        py::dict found;
        for (const LauncherFunction& x : launcher->functions)
            found[x.name] = py::cpp_function([&x](const py::args& arguments) { return call(x, arguments); },
                                             py::name(x.name));
        return found;
    }

    py::dict constants() const {
        py::dict found;
        for (const auto& [name, value] : launcher->constants) found[name] = value;
        return found;
    }

    void load_kernels(const std::string& cubin) const { load(cubin.c_str()); }

  private:
    template <class T> static T symbol(void* handle, const char* name) {
        void* const found = dlsym(handle, name);
        if (found == nullptr) throw std::runtime_error(std::string("no ") + name + " in a launcher");
        return reinterpret_cast<T>(found);
    }

    const Launcher* launcher;
    decltype(&tfla_load_kernels) load;
};

}  // namespace
}  // namespace tfla_tk

PYBIND11_MODULE(tfla_launcher_module, m) {
    using namespace tfla_tk;
    py::class_<PreparedLaunch>(m, "Launch", "A launch without the addresses of tensors.");
    py::class_<Launches>(m, "Launches", "Launches of any launchers, one after the other.")
        .def(py::init<const std::vector<const PreparedLaunch*>&>(), py::arg("launches"),
             py::keep_alive<1, 2>())
        .def("run", &Launches::run, py::arg("starts"), py::arg("stream"),
             "Launches them on a stream. starts: addresses of the tensors, by their numbers.",
             py::call_guard<py::gil_scoped_release>());
    py::class_<Library>(m, "Library", "The host half of some kernels.")
        .def(py::init<const std::string&>(), py::arg("path"))
        .def("functions", &Library::functions, "Its functions by their names.")
        .def("constants", &Library::constants, "Its constants by their names.")
        .def("load_kernels", &Library::load_kernels, py::arg("cubin"),
             "Adds the kernels of a cubin to those that it launches; needs a driver.");
}
