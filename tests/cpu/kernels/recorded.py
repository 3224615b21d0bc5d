"""Launchers that note what they would launch, in the place of the real ones: recorder.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tfla_tk import build
from tfla_tk.build import Instance, Launcher, builder, cache, compiler, sources
from tfla_tk.build.locking import file_lock

RECORDER = Path(__file__).with_name("recorder.cpp")


class RecordedLauncher:
    """A launcher, compiled from its sources, that launches nothing.

    Attributes:
        module: what Python calls of it.
        may_launch: the symbols of the kernels that it may launch.
        kernels: those of every instance that is compiled for it.
    """

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        path, of_instances = _compiled(launcher, folder)
        functions, constants = builder._extension().open(str(path))
        self.module = SimpleNamespace(**functions, **constants)
        self._library = ctypes.CDLL(str(path))
        self.may_launch = set(_told_by(self._library.recorded_kernels))
        self.kernels: dict[str, set[str]] = defaultdict(set)
        for line in _told_by(ctypes.CDLL(str(of_instances)).recorded_kernels):
            symbol, instance = line.split()
            self.kernels[instance].add(symbol)

    def launched(self) -> list[str]:
        """Symbols, since the last call."""
        return _told_by(self._library.recorded_launches)


def _told_by(function: Any) -> list[str]:
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode().splitlines()


def _table(instances: list[Instance]) -> str:
    """Source of the kernels of instances."""
    headers = "".join(f'#include "{header}"\n' for header in dict.fromkeys(x.header for x in instances))
    stubs, rows = "", ""
    for n, x in enumerate(instances):
        of_instance = ", ".join(f"reinterpret_cast<const void*>(&{kernel})" for kernel in x.kernels)
        stubs += f"namespace tfla_tk::{x.namespace} {{ const void* const of_{n}[] = {{{of_instance}}}; }}\n"
        for place in range(len(x.kernels)):
            rows += f'    {{"{x.name}", tfla_tk::{x.namespace}::of_{n}[{place}]}},\n'
    table = "std::vector<std::pair<const char*, const void*>> kernels_of_instances"
    return f"{headers}#include <vector>\n{stubs}extern const {table};\nconst {table}{{\n{rows}}};\n"


def _compiled(launcher: Launcher, folder: Path) -> tuple[Path, Path]:
    """The launcher, and the kernels of its instances, for this run of the tests and later ones."""
    toolchain, kittens = build.find_toolchain(), build.find_thunderkittens(clone=False)
    instances = [instance for instance in build.all_instances() if instance.launcher == launcher]
    table, root = _table(instances), sources.kernels_root()
    parts = [RECORDER.read_text(), table, toolchain.identity]
    parts += [cache.source_key(artifact, kittens.identity) for artifact in (launcher, *instances)]
    prefix = f"recorded_{launcher.name}"
    place = folder / f"{prefix}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"
    libraries = place / "launcher.so", place / "instances.so"
    with file_lock(folder / f"{prefix}.lock"):
        if place.exists():
            return libraries
        for old in folder.glob(f"{prefix}-*"):
            shutil.rmtree(old)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = Path(scratch) / "instances.cu"
            source.write_text(table)
            common = [str(toolchain.nvcc), *(f"-D{name}={value}" for name, value in launcher.defines)]
            common += [f"-I{directory}" for directory in (root, kittens.include, toolchain.include)]
            compiled = {
                root / launcher.source: compiler.LAUNCHER_FLAGS,
                source: compiler.LAUNCHER_FLAGS,
                RECORDER: compiler.HOST_FLAGS,
            }
            objects = []
            for n, (file, flags) in enumerate(compiled.items()):
                objects.append(f"{scratch}/{n}.o")
                _run([*common, *flags, "-c", str(file), "-o", objects[-1]])
            launches, of_instances, recorder = objects
            made = Path(scratch) / "made"
            made.mkdir()
            link = [str(toolchain.nvcc), "-shared", "-cudart=none", "-Xlinker=-Bsymbolic", recorder]
            _run([*link, launches, "-o", str(made / libraries[0].name)])
            _run([*link, of_instances, "-o", str(made / libraries[1].name)])
            made.rename(place)
    return libraries


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{' '.join(command)}"
