"""The compiler commands: instances to a cubin, a launcher to a library, the Python extension that all
share."""

import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tfla_tk.build import sources
from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import Instance, Launcher
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

EXTENSION = "tfla_launcher_module"  # the name that it has as a module of Python
EXTENSION_SOURCE = "common/launcher_module.cpp"
LOADER_SOURCE = "common/loaded_kernels.cpp"  # of every launcher
_TIMEOUT_S = 1800
_QUOTED_LINES = 40

_LANGUAGE = ("-std=c++20", "-DNDEBUG")
_FOR_SM90 = (
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DKITTENS_HOPPER",
    "-gencode=arch=compute_90a,code=sm_90a",
)
# -Og: a launcher is what a first call waits for
_HOST = "-Xcompiler=-Og,-fPIC,-fvisibility=hidden,-Wno-psabi"
DEVICE_FLAGS = (*_LANGUAGE, *_FOR_SM90, "-O3", "--use_fast_math", "-Xptxas=-v,--warn-on-spills")
LAUNCHER_FLAGS = (*_LANGUAGE, *_FOR_SM90, "-DTFLA_LAUNCHER", _HOST)
HOST_FLAGS = (*_LANGUAGE, _HOST)
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL,-Bsymbolic,-s")


@dataclass(frozen=True)
class CompileResult:
    """A compiled cubin, what ptxas said of it, and the seconds it took."""

    cubin: Path
    ptxas_log: str
    seconds: float


class Slots:
    """At most ``jobs`` compiler processes at a time, over all the threads of a build."""

    def __init__(self, jobs: int) -> None:
        self._semaphore = threading.BoundedSemaphore(jobs)
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def run(self, command: Sequence[str], what: str) -> str:
        with self._semaphore:
            if self._closed:
                raise BuildError(f"{what}: the build has ended before")
            return _run(command, what)


def source_of(instances: Sequence[Instance]) -> str:
    """The text that instances are compiled from: their headers, and what has the compiler emit their
    kernels."""
    headers = "".join(f'#include "{header}"\n' for header in dict.fromkeys(x.header for x in instances))
    lines = []
    for n, instance in enumerate(instances):
        kernels = "".join(f"\n    &{kernel}," for kernel in instance.kernels).rstrip(",")
        lines += [
            f"namespace tfla_tk::{instance.namespace} {{",
            f"template <auto... kKernels> struct Emitted{n} {{}};",
            f"template struct Emitted{n}<{kernels}>;",
            "}\n",
        ]
    return headers + "\n".join(lines)


def compile_cubin(
    instances: Sequence[Instance], toolchain: Toolchain, kittens: ThunderKittens, cubin: Path, slots: Slots
) -> str:
    """Compile instances of one launcher to a cubin, ungated, without GPU and driver; returns the ptxas
    log."""
    source = cubin.with_suffix(".cu")
    source.write_text(source_of(instances))
    (launcher,) = {instance.launcher for instance in instances}
    includes = f"-I{sources.kernels_root()}", f"-I{kittens.include}"
    command = [str(toolchain.nvcc), *DEVICE_FLAGS, *_defines(launcher), *includes, "-cubin", str(source)]
    what = instances[0].name if len(instances) == 1 else f"{len(instances)} kernels of {launcher.name}"
    return slots.run([*command, "-o", str(cubin)], what)


def compile_launcher(
    launcher: Launcher, toolchain: Toolchain, kittens: ThunderKittens, library: Path, slots: Slots
) -> None:
    """Compile the host half of some kernels to a library, which needs neither Python nor a driver."""
    root, nvcc = sources.kernels_root(), str(toolchain.nvcc)
    flags = *LAUNCHER_FLAGS, *_defines(launcher), f"-I{root}", f"-I{kittens.include}"
    steps = {
        "host half": [nvcc, *flags, str(root / launcher.source)],
        "loader": [nvcc, *HOST_FLAGS, f"-I{root}", f"-I{toolchain.include}", str(root / LOADER_SOURCE)],
    }
    objects = {step: str(library.with_suffix(f".{step}.o")) for step in steps}
    with ThreadPoolExecutor(len(steps)) as pool:
        running = [
            pool.submit(slots.run, [*command, "-c", "-o", objects[step]], f"{launcher.name}: {step}")
            for step, command in steps.items()
        ]
    for future in running:
        future.result()
    link = [nvcc, *LINK_FLAGS, f"-L{toolchain.lib}", *objects.values(), "-o", str(library)]
    slots.run(link, f"{launcher.name}: link")
    for file in objects.values():
        Path(file).unlink()


def compile_extension(toolchain: Toolchain, library: Path, slots: Slots) -> None:
    """Compile the extension by which Python reaches launchers."""
    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").is_file():
        raise BuildError(f"Python.h is not in {python}", "install Python's headers (python3-dev)")
    root = sources.kernels_root()
    flags = *HOST_FLAGS, f"-I{root}", f"-I{python}", "-shared", "-cudart=none"
    command = [str(toolchain.nvcc), *flags, str(root / EXTENSION_SOURCE)]
    slots.run([*command, "-ldl", "-o", str(library)], "the extension that launches kernels")


def _defines(launcher: Launcher) -> list[str]:
    return [f"-D{name}={value}" for name, value in launcher.defines]


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{what}: {command[0]} did not finish: {error}") from error
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-_QUOTED_LINES:])
        raise BuildError(
            f"{what}: the compiler fails (exit status {done.returncode})\n{said}\n{' '.join(command)}"
        )
    return done.stdout
