"""Launchers that note what they would launch, in the place of the real ones: recorder.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build import Instance, Launcher, builder, cache, compiler
from tfla_tk.build.locking import file_lock

RECORDER = Path(__file__).with_name("recorder.cpp")
LOADED_KERNEL = "_ZN7tfla_tk13loaded_kernelI"  # how symbols of it begin, one for each kernel


class RecordedLauncher:
    """A launcher, compiled from its sources, that launches nothing.

    Attributes:
        module: what Python calls of it.
        may_launch: the symbols of the kernels that it may launch.
        kernels: those of every instance that is compiled for it.
    """

    def __init__(self, launcher: Launcher, folder: Path, objects: Path) -> None:
        _, path = compiled(launcher, folder, objects)
        builder._files[launcher] = path
        self.module = builder.load(launcher)
        self._library = ctypes.CDLL(str(path))
        symbols = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
        places = re.findall(rf"^([0-9a-f]+) \w {LOADED_KERNEL}", symbols, re.MULTILINE)
        symbol_at = self._library.recorded_symbol
        self.may_launch = {_told_by(symbol_at, ctypes.c_size_t(int(place, 16)))[0] for place in places}
        self.kernels: dict[str, set[str]] = defaultdict(set)
        for line in _told_by(self._library.recorded_kernels):
            symbol, instance = line.split()
            self.kernels[instance].add(symbol)

    def launched(self) -> list[str]:
        """Symbols, since the last call."""
        return _told_by(self._library.recorded_launches)


def _told_by(function: Any, *arguments: Any) -> list[str]:
    function.restype = ctypes.c_char_p
    found: bytes = function(*arguments)
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


def compiled(launcher: Launcher, folder: Path, objects: Path) -> tuple[Path, Path]:
    """The launcher and the one that launches nothing, of one source with a table of its instances.

    Args:
        folder: of libraries, for this run of the tests and later ones.
        objects: of what is compiled once for both, or for several launchers.
    """
    toolchain, kittens = build.find_toolchain(), build.find_thunderkittens(clone=False)
    instances = [instance for instance in build.all_instances() if instance.launcher == launcher]
    source = f'#include "{launcher.source}"\n{_table(instances)}'
    parts = [RECORDER.read_text(), source, toolchain.identity]
    parts += [cache.source_key(artifact, kittens.identity) for artifact in (launcher, *instances)]
    prefix = f"recorded_{launcher.name}"
    place = folder / f"{prefix}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"
    libraries = place / "launcher.so", place / "recorded.so"
    with file_lock(folder / f"{prefix}.lock"):
        if place.exists():
            return libraries
        for old in folder.glob(f"{prefix}-*"):
            shutil.rmtree(old)
        with tempfile.TemporaryDirectory(dir=folder) as scratch, pytest.MonkeyPatch.context() as patch:
            file, made = Path(scratch) / "source.cu", Path(scratch) / "made"
            file.write_text(source)
            made.mkdir()
            patch.setattr(compiler, "_run", partial(_run_once, compiler._run, objects))
            of_both = replace(launcher, source=str(file)), toolchain, kittens
            compiler.compile_launcher(*of_both, made / libraries[0].name, compiler.Slots(1))
            patch.setattr(compiler, "LOADER_SOURCE", str(RECORDER))
            patch.setattr(compiler, "LINK_FLAGS", ("-shared", "-cudart=none", "-Xlinker=-Bsymbolic"))
            compiler.compile_launcher(*of_both, made / libraries[1].name, compiler.Slots(1))
            made.rename(place)
    return libraries


def _run_once(run: Callable[[list[str], str], str], objects: Path, command: list[str], what: str) -> str:
    """Runs a command, but for a source that another one has compiled alike."""
    if "-c" not in command:
        return run(command, what)
    *rest, target = command
    kept = objects / hashlib.sha256(repr(rest).encode()).hexdigest()[:32]
    with file_lock(kept.with_suffix(".lock")):
        if not kept.exists():
            run(command, what)
            shutil.copy(target, kept)
    shutil.copy(kept, target)
    return ""
