"""Kernels that run on a CPU: their sources, compiled by g++ with the emulator in the place of CUDA."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tfla_tk.build import sources
from tfla_tk.build.toolchain import find_toolchain

EMULATOR = Path(__file__).parent / "emulator"
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
)


def compile_emulated(source: str, folder: Path) -> SimpleNamespace:
    """A launcher's functions by their names, whose launches run on the CPU.

    Args:
        source: of `emulator/`. folder: for the libraries; what it has is not compiled again.
    """
    include = (EMULATOR, sources.kernels_root(), find_toolchain().include, sysconfig.get_path("include"))
    library, extension = folder / f"{source}.so", folder / "tfla_launcher_module.so"
    for path, target in (
        (EMULATOR / source, library),
        (sources.kernels_root() / "common/launcher_module.cpp", extension),
    ):
        if target.exists():
            continue
        command = ["g++", *_FLAGS, *(f"-I{x}" for x in include), str(path), "-ldl", "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr[-4000:]
    functions, constants = _module(extension).open(str(library))
    return SimpleNamespace(**functions, constants=constants)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("tfla_launcher_module", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
