// The Python extension: it opens launchers, passes arguments to their functions and runs prepared launches.
// One serves all families, and all versions of Python from 3.10 on.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <dlfcn.h>

#include "common/launcher.h"

namespace tfla_tk {
namespace {

constexpr const char* kLaunch = "tfla_tk.Launch";
constexpr const char* kFunction = "tfla_tk.Function";
constexpr const char* kLoader = "tfla_tk.Loader";
constexpr const char* kLaunches = "tfla_tk.Launches";

using Loader = decltype(&tfla_load_kernels);

// Calls f, which returns a new reference or null with an error set; a C++ exception becomes Python's.
template <class F> PyObject* guarded(F f) {
    try {
        return f();
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// Calls f without the interpreter's lock, which comes back even where f throws.
template <class F> void unlocked(F f) {
    struct Released {
        PyThreadState* const state = PyEval_SaveThread();
        ~Released() { PyEval_RestoreThread(state); }
    } released;
    f();
}

template <class T> T* held(PyObject* capsule, const char* name) {
    return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

// Appends the numbers of nested tuples and lists; false with an error set where there is anything else.
bool flatten(PyObject* x, std::vector<Argument>& into) {
    const bool is_tuple = PyTuple_Check(x);
    if (is_tuple || PyList_Check(x)) {
        const Py_ssize_t count = is_tuple ? PyTuple_Size(x) : PyList_Size(x);
        for (Py_ssize_t n = 0; n < count; n++)
            if (!flatten(is_tuple ? PyTuple_GetItem(x, n) : PyList_GetItem(x, n), into)) return false;
        return true;
    }
    if (PyFloat_Check(x)) {
        into.push_back({Argument::Kind::real, 0, PyFloat_AsDouble(x)});
    } else if (x == Py_None) {
        into.push_back({Argument::Kind::none, 0, 0.});
    } else {
        const std::int64_t integer = PyLong_AsLongLong(x);
        if (integer == -1 && PyErr_Occurred()) return false;
        into.push_back({Argument::Kind::integer, integer, 0.});
    }
    return true;
}

void delete_launch(PyObject* capsule) { delete held<Launch>(capsule, kLaunch); }

PyObject* numbers(const std::vector<std::int64_t>& told) {
    if (told.size() == 1) return PyLong_FromLongLong(told[0]);
    PyObject* const found = PyTuple_New(told.size());
    for (std::size_t n = 0; found && n < told.size(); n++)
        PyTuple_SetItem(found, n, PyLong_FromLongLong(told[n]));
    return found;
}

// A launcher's function, which `self` holds.
PyObject* call(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        const auto* const function = held<const LauncherFunction>(self, kFunction);
        std::vector<Argument> flat;
        flat.reserve(64);
        if (!flatten(arguments, flat)) return nullptr;
        Arguments reader(function->name, flat);
        if (function->prepare) {
            auto launch = function->prepare(reader);
            reader.end();
            return PyCapsule_New(launch.release(), kLaunch, delete_launch);
        }
        if (function->tell) {
            const auto told = function->tell(reader);
            reader.end();
            return numbers(told);
        }
        unlocked([&] { function->run(reader); });
        Py_RETURN_NONE;
    });
}

PyObject* load_kernels(PyObject* self, PyObject* path) {
    return guarded([&]() -> PyObject* {
        const char* const cubin = PyUnicode_AsUTF8AndSize(path, nullptr);
        if (cubin == nullptr) return nullptr;
        const Loader load = *held<Loader>(self, kLoader);
        unlocked([&] { load(cubin); });
        Py_RETURN_NONE;
    });
}

PyMethodDef load_method{
    "load_kernels", load_kernels, METH_O,
    "Adds the kernels of a cubin, a path, to those that the launcher launches; needs a driver."};

template <class T> T symbol(void* library, const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) throw std::runtime_error(std::string("no ") + name + " in a launcher");
    return reinterpret_cast<T>(found);
}

// Puts a new reference into a dictionary; false with an error set.
bool put(PyObject* into, const char* name, PyObject* value) {
    const bool done = value && PyDict_SetItemString(into, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

// A new reference to a function with what it holds, which lives as long as the process.
PyObject* function_with(PyMethodDef* method, const void* holds, const char* name) {
    PyObject* const self = PyCapsule_New(const_cast<void*>(holds), name, nullptr);
    PyObject* const found = self ? PyCFunction_New(method, self) : nullptr;
    Py_XDECREF(self);
    return found;
}

// A launcher's library, which is never closed.
PyObject* open(PyObject*, PyObject* path) {
    return guarded([&]() -> PyObject* {
        const char* const file = PyUnicode_AsUTF8AndSize(path, nullptr);
        if (file == nullptr) return nullptr;
        void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw std::runtime_error(dlerror());
        const Launcher* const launcher = symbol<decltype(&tfla_launcher)>(library, "tfla_launcher")();
        PyObject *const functions = PyDict_New(), *const constants = PyDict_New();
        bool done = functions && constants;
        for (const LauncherFunction& x : launcher->functions) {
            auto* const method = new PyMethodDef{x.name, call, METH_VARARGS, nullptr};
            done = done && put(functions, x.name, function_with(method, &x, kFunction));
        }
        auto* const load = new Loader(symbol<Loader>(library, "tfla_load_kernels"));
        done = done && put(functions, "load_kernels", function_with(&load_method, load, kLoader));
        for (const auto& [name, value] : launcher->constants)
            done = done && put(constants, name, PyLong_FromLongLong(value));
        PyObject* const found = done ? PyTuple_Pack(2, functions, constants) : nullptr;
        Py_XDECREF(functions);
        Py_XDECREF(constants);
        return found;
    });
}

// Several launches of any launchers, one after the other, and the list that keeps them alive.
struct Launches {
    std::vector<const Launch*> launches;
    PyObject* prepared;
};

void delete_launches(PyObject* capsule) {
    auto* const launches = held<Launches>(capsule, kLaunches);
    Py_DECREF(launches->prepared);
    delete launches;
}

PyObject* run(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 2 || !PyList_Check(arguments[0])) {
            PyErr_SetString(PyExc_TypeError, "run takes a list of addresses and a stream");
            return nullptr;
        }
        std::vector<std::int64_t> starts(PyList_Size(arguments[0]));
        for (std::size_t n = 0; n < starts.size(); n++)
            starts[n] = PyLong_AsLongLong(PyList_GetItem(arguments[0], n));
        void* const stream = PyLong_AsVoidPtr(arguments[1]);
        if (PyErr_Occurred()) return nullptr;
        const auto* const launches = held<Launches>(self, kLaunches);
        const Addresses at(starts);
        unlocked([&] {
            for (const Launch* const launch : launches->launches) launch->run(at, stream);
        });
        Py_RETURN_NONE;
    });
}

PyMethodDef run_method{"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run)), METH_FASTCALL,
                       "Launches on a stream. starts: addresses of the tensors, by their numbers; stream."};

PyObject* launches(PyObject*, PyObject* prepared) {
    return guarded([&]() -> PyObject* {
        PyObject* const kept = PySequence_List(prepared);
        if (kept == nullptr) return nullptr;
        auto* const found = new Launches{{}, kept};
        PyObject* const self = PyCapsule_New(found, kLaunches, delete_launches);
        for (Py_ssize_t n = 0; n < PyList_Size(kept); n++) {
            const Launch* const launch = held<Launch>(PyList_GetItem(kept, n), kLaunch);
            if (launch == nullptr) return Py_DECREF(self), nullptr;
            found->launches.push_back(launch);
        }
        PyObject* const bound = PyCFunction_New(&run_method, self);
        Py_DECREF(self);
        return bound;
    });
}

PyMethodDef methods[] = {
    {"open", open, METH_O,
     "The functions and the constants of a launcher's library, a path, each by its name."},
    {"launches", launches, METH_O, "A function that runs prepared launches one after the other."},
    {},
};
PyModuleDef module{PyModuleDef_HEAD_INIT, "tfla_launcher_module", nullptr, -1, methods};

}  // namespace
}  // namespace tfla_tk

PyMODINIT_FUNC PyInit_tfla_launcher_module() { return PyModule_Create(&tfla_tk::module); }
