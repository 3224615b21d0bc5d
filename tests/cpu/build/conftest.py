"""Stand-ins for a CUDA toolkit and for the kernel sources."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tfla_tk.build import Instance, sources
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

FAKE_NVCC = """#!/bin/sh
case "$1" in
    --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
    --dryrun) echo '#$ TOP={root}' >&2 ;;
    *) exit 1 ;;
esac
"""

TOY_KERNEL = """
#include "common/params.h"
#include "config.cuh"
// a template's static: shared between modules unless their symbols are their own
template <typename T> struct Constant { static inline int value = ANSWER; };
__global__ void toy(float* out) { out[threadIdx.x] = ANSWER + out[threadIdx.x]; }
int answer() { toy<<<1, 32>>>(nullptr); return Constant<int>::value; }
"""

# of the family, of a folder below it, of one beside it, of all families, of CUDA, and under a condition
TOY_CONFIG = """
#pragma once
#include "parts/part.cuh"
#include "cuda_runtime.h"
#include <cstdint>
  #  include <common/deep.h>  // found by its path below kernels/
#ifdef NEVER
#include "parts/conditional.cuh"
#endif
"""

TOY_BINDINGS = """
// Python's own interface: the headers of pybind11 take ten seconds to compile
#include <Python.h>
#include <cuda.h>
#include "common/params.h"
static PyObject* answer_(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
static PyObject* encode(PyObject*, PyObject*) {
    return PyLong_FromLong(cuTensorMapEncodeTiled(
        nullptr, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 0, nullptr, nullptr, nullptr, nullptr, nullptr,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}
static PyObject* error_text(PyObject*, PyObject*) {
    const char* text = nullptr;
    cuGetErrorString(CUDA_ERROR_INVALID_VALUE, &text);
    return PyUnicode_FromString(text);
}
static PyMethodDef methods[] = {{"answer", answer_, METH_NOARGS, nullptr},
                                {"encode", encode, METH_NOARGS, nullptr},
                                {"error_text", error_text, METH_NOARGS, nullptr},
                                {}};
// the module's name, a macro, in its own text and in the name of its first function
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TFLA_MODULE), nullptr, -1, methods};
PyMODINIT_FUNC INIT(TFLA_MODULE)() { return PyModule_Create(&module); }
"""


@pytest.fixture
def make_toolkit() -> Callable[..., Path]:
    """Make a directory that looks like a CUDA toolkit; its nvcc answers --version and --dryrun alone."""

    def make(root: Path, version: str = "13.0", headers: bool = True) -> Path:
        nvcc = root / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(FAKE_NVCC.format(version=version, root=root))
        nvcc.chmod(0o755)
        (root / "lib64").mkdir()
        (root / "lib64" / "libcudart_static.a").touch()
        if headers:
            for name in ("cuda.h", "cuda_runtime.h", "crt/host_config.h", "cccl/nv/target"):
                header = root / "include" / name
                header.parent.mkdir(parents=True, exist_ok=True)
                header.touch()
        return root

    return make


@pytest.fixture
def kernel_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A kernels/ directory with one toy kernel, in place of the real one."""
    root = tmp_path / "kernels"
    real = sources.kernels_root()
    for folder in ("common", "scalar_gate/bindings", "toy/parts", "other"):
        (root / folder).mkdir(parents=True)
    for name in ("common/driver_shim.cpp", sources.COMMIT_FILE):
        shutil.copy(real / name, root / name)
    (root / "scalar_gate/bindings/forward.cpp").write_text(TOY_BINDINGS)
    (root / "common/params.h").write_text("#pragma once\nint answer();\n")
    (root / "toy/toy.cu").write_text(TOY_KERNEL)
    (root / "common/deep.h").write_text("#pragma once\n")
    (root / "common/unused.h").write_text("#pragma once\n")
    (root / "toy/config.cuh").write_text(TOY_CONFIG)
    (root / "toy/parts/part.cuh").write_text('#pragma once\n#include "../../other/shared.cuh"\n')
    (root / "toy/parts/conditional.cuh").write_text("#pragma once\n")
    (root / "toy/unused.cuh").write_text("#pragma once\n")
    (root / "other/shared.cuh").write_text('#pragma once\n#include "shared.cuh"\n#include <vector>\n')
    (root / "other/other.cu").write_text("\n")
    monkeypatch.setattr(sources, "kernels_root", lambda: root)
    return root


@pytest.fixture
def toy() -> Instance:
    """The instance of the toy kernel that answers 1."""
    return Instance("toy_1", "toy/toy.cu", (("ANSWER", "1"),))


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    """A description of an nvcc that is never run."""
    return Toolchain(tmp_path / "nvcc", tmp_path, tmp_path, (13, 0), "nvcc 13.0.88; g++ 13", "PATH")


@pytest.fixture
def kittens(tmp_path: Path) -> ThunderKittens:
    """A ThunderKittens tree with a single header."""
    root = tmp_path / "kittens"
    (root / "include").mkdir(parents=True)
    (root / "include/kittens.cuh").write_text("#pragma once\n")
    return ThunderKittens(root, "commit", "cache")


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace PATH by the given directories and the system's shell."""

    def replace(*folders: Path) -> None:
        monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), "/bin"]))

    return replace
