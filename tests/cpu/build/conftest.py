"""Stand-ins for a CUDA toolkit and for the kernel sources."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tfla_tk.build import Instance, Launcher, builder, compiler, sources
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

FAKE_NVCC = """#!/bin/sh
case "$1" in
    --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
    --dryrun) echo '#$ TOP={root}' >&2 ;;
    *) exit 1 ;;
esac
"""

# of the family, of a folder below it, of one beside it, of all families, of CUDA, and under a condition
TOY_KERNEL = """
#pragma once
#include "parts/part.cuh"
#include "cuda_runtime.h"
#include <cstdint>
  #  include <common/deep.h>  // found by its path below kernels/
#ifdef NEVER
#include "parts/conditional.cuh"
#endif
namespace tfla_tk::toy {
template <int kAdds> __global__ void toy_kernel(float* out) { out[threadIdx.x] += kAdds; }
}  // namespace tfla_tk::toy
"""

# a template's static would be shared between libraries, were their symbols not their own
TOY_LAUNCHER = """
#include <cuda.h>
#include "common/launcher.h"
#include "toy/kernel.cuh"
using tfla_tk::Arguments;
template <typename T> struct Constant { static inline int value = ANSWER; };
static std::vector<std::int64_t> answer(Arguments&) { return {Constant<int>::value}; }
static std::vector<std::int64_t> encode(Arguments&) {
    return {cuTensorMapEncodeTiled(
        nullptr, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 0, nullptr, nullptr, nullptr, nullptr, nullptr,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)};
}
const tfla_tk::Launcher* tfla_launcher() {
    static const tfla_tk::Launcher launcher{
        {{.name = "answer", .tell = &answer}, {.name = "encode", .tell = &encode}},
        {{"CHUNK", 64}, {"CODES.one", 1}}};
    return &launcher;
}
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
    """A kernels/ directory with the toys in place of the real kernels."""
    root = tmp_path / "kernels"
    real = sources.kernels_root()
    shutil.copytree(real / "common", root / "common")
    shutil.copy(real / sources.COMMIT_FILE, root / sources.COMMIT_FILE)
    files = {
        "common/deep.h": "#pragma once\n",
        "common/unused.h": "#pragma once\n",
        "toy/kernel.cuh": TOY_KERNEL,
        "toy/launcher.cu": TOY_LAUNCHER,
        "toy/parts/conditional.cuh": "#pragma once\n",
        "toy/parts/part.cuh": '#pragma once\n#include "../../other/shared.cuh"\n',
        "toy/unused.cuh": "#pragma once\n",
        "other/shared.cuh": '#pragma once\n#include "shared.cuh"\n#include <vector>\n',
        "other/other.cu": "\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(sources, "kernels_root", lambda: root)
    return root


def toy_launcher(answer: int) -> Launcher:
    defines = (("ANSWER", str(answer)),)
    return Launcher(f"toy_{answer}", "toy/launcher.cu", defines, ("CHUNK",))


def toy_instance(adds: int, kernel: str = "toy_kernel") -> Instance:
    return Instance(f"adds_{adds}", toy_launcher(1), "toy/kernel.cuh", (f"{kernel}<{adds}>",), "toy", "bf16")


@pytest.fixture
def launcher() -> Launcher:
    """The launcher that answers 1."""
    return toy_launcher(1)


@pytest.fixture
def toy() -> Instance:
    """The kernel that adds 1."""
    return toy_instance(1)


@pytest.fixture
def toys() -> list[Instance]:
    """Kernels of one launcher that add 1, 2 and 3."""
    return [toy_instance(adds) for adds in (1, 2, 3)]


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded or compiled anything yet."""
    for name, empty in (("_launchers", {}), ("_attached", {}), ("_files", {}), ("_loaded_files", set())):
        monkeypatch.setattr(builder, name, empty)
    monkeypatch.setattr(builder, "_extension", functools.cache(builder._extension.__wrapped__))


class FakeCompiler:
    """Stands for nvcc: writes files that tell what they are made of.

    Attributes:
        compiled: What each process made, in the order of their ends.
        most: Processes at a time.
        log: What ptxas says of the source of a cubin.
        wait_for: As many have to run at a time before one of them ends.
        seconds: That each of them takes.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.most, self.wait_for, self.seconds = 0, 1, 0.0
        self.log: Callable[[str], str] = lambda source: ""
        self._running = 0
        self._changed = threading.Condition()

    def __call__(self, command: Sequence[str], what: str) -> str:
        with self._changed:
            self._running += 1
            self.most = max(self.most, self._running)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self.wait_for, timeout=30)
        time.sleep(self.seconds)
        with self._changed:
            self._running -= 1
            self.compiled.append(what)
        Path(command[command.index("-o") + 1]).write_text(what)
        if "-cubin" not in command:
            return ""
        return self.log(Path(command[command.index("-cubin") + 1]).read_text())


class FakeExtension:
    """Stands for the extension: tells the constants of launchers, and notes which cubins are loaded."""

    def __init__(self) -> None:
        self.constants = {"CHUNK": 64, "CODES.one": 1}
        self.loaded: list[Path] = []

    def open(self, path: str) -> tuple[dict[str, Any], dict[str, int]]:
        assert Path(path).is_file()
        return {"load_kernels": self._load}, self.constants

    def _load(self, cubin: str) -> None:
        if not Path(cubin).is_file():
            raise RuntimeError("no such file")
        self.loaded.append(Path(cubin))


@pytest.fixture
def fake_compiler(
    monkeypatch: pytest.MonkeyPatch,
    isolated_environment: Path,
    kernel_sources: Path,
    toolchain: Toolchain,
    kittens: ThunderKittens,
    nothing_loaded: None,
) -> FakeCompiler:
    """In the place of nvcc and ThunderKittens."""
    fake = FakeCompiler()
    monkeypatch.setattr(compiler, "_run", fake)
    monkeypatch.setattr(builder, "find_toolchain", lambda: toolchain)
    monkeypatch.setattr(builder, "find_thunderkittens", lambda clone=True: kittens)
    return fake


@pytest.fixture
def fake_extension(fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> FakeExtension:
    """In the place of what the compiler makes of the extension."""
    fake = FakeExtension()
    monkeypatch.setattr(builder, "_extension", lambda: fake)
    return fake


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
