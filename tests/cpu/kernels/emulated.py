"""Kernels that run on a CPU: their sources, compiled by g++ with the emulator in the place of CUDA."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tfla_tk.build import sources
from tfla_tk.build.locking import file_lock
from tfla_tk.build.toolchain import find_toolchain

EMULATOR = Path(__file__).parent / "emulator"
_FLAGS = (
    "-std=c++20",
    "-Og",
    "-U_FORTIFY_SOURCE",  # it takes jumps between fibres for faults
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
)


def compile_emulated(source: str, cache: Path) -> SimpleNamespace:
    """A launcher's functions by their names, whose launches run on the CPU.

    Args:
        source: of `emulator/`.
        cache: of libraries, for this run of the tests and later ones.
    """
    toolchain, root = find_toolchain(), sources.kernels_root()
    include = (EMULATOR, root, toolchain.include, sysconfig.get_path("include"))
    files = sorted(path for folder in include[:2] for path in folder.rglob("*") if path.is_file())
    parts = [*_FLAGS, source, toolchain.identity, *include, *(path.read_bytes() for path in files)]
    place = cache / f"emulated-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"
    library, extension = source + ".so", "tfla_launcher_module.so"
    with file_lock(cache / "emulated.lock"):
        if not place.exists():
            for old in cache.glob("emulated-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                for path, target in (
                    (EMULATOR / source, library),
                    (root / "common/launcher_module.cpp", extension),
                ):
                    command = ["g++", *_FLAGS, *(f"-I{x}" for x in include), str(path), "-ldl", "-o"]
                    done = subprocess.run([*command, str(made / target)], capture_output=True, text=True)
                    assert done.returncode == 0 and not done.stderr, done.stderr[-4000:]
                made.rename(place)
    functions, constants = _module(place / extension).open(str(place / library))
    return SimpleNamespace(**functions, constants=constants)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("tfla_launcher_module", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
