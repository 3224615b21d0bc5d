"""The compiler commands: one kernel instance to a Python module, or to a cubin."""

from __future__ import annotations

import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pybind11

from tfla_tk import env
from tfla_tk.build import sources
from tfla_tk.build.errors import BuildError
from tfla_tk.build.gate import check_ptxas_log
from tfla_tk.build.instances import Instance
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

_TIMEOUT_S = 1800
_QUOTED_LINES = 40

# -fno-gnu-unique: modules of one source share no symbols, so several load into one process
COMMON_FLAGS = (
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique,-Wno-psabi",
)
DEVICE_FLAGS = (
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DKITTENS_HOPPER",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xptxas=-v,--warn-on-spills",
    "-lineinfo",
    "-include=chrono",
)
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL,-Bsymbolic")


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

    def run(self, command: Sequence[str], what: str) -> str:
        """Run one compiler command and return its output.

        Raises:
            BuildError: It fails; the message ends with the last lines of its output.
        """
        with self._semaphore:
            return _run(command, what)


def compile_module(
    instance: Instance, toolchain: Toolchain, kittens: ThunderKittens, out_dir: Path, slots: Slots
) -> tuple[Path, str]:
    """Compile an instance to ``<out_dir>/<name><extension suffix>``.

    Kernel, bindings and driver shim compile at the same time; the link follows.

    Returns:
        The module and the ptxas log.

    Raises:
        BuildError: A compiler fails, or the ptxas gate refuses the kernel.
    """
    root = sources.kernels_root()
    nvcc = str(toolchain.nvcc)
    defines = _defines(instance)
    host = [*COMMON_FLAGS, *_host_includes(toolchain)]
    steps = {
        "kernel": [*_device_command(instance, toolchain, kittens), "-c"],
        "bindings": [
            nvcc,
            *host,
            *defines,
            f"-DTFLA_MODULE={instance.name}",
            "-c",
            str(root / instance.bindings),
        ],
        "driver_shim": [nvcc, *host, "-c", str(root / "common/driver_shim.cpp")],
    }
    objects = {step: str(out_dir / f"{step}.o") for step in steps}
    with ThreadPoolExecutor(len(steps)) as pool:
        running = {
            step: pool.submit(slots.run, [*command, "-o", objects[step]], f"{instance.name}: {step}")
            for step, command in steps.items()
        }
    logs = {step: future.result() for step, future in running.items()}
    if env.refuses_slow_kernels():
        check_ptxas_log(logs["kernel"], instance.name)
    module = out_dir / f"{instance.name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    link = [nvcc, *LINK_FLAGS, f"-L{toolchain.lib}", *objects.values(), "-o", str(module)]
    slots.run(link, f"{instance.name}: link")
    for file in objects.values():
        Path(file).unlink()
    return module, logs["kernel"]


def compile_to_cubin(
    instance: Instance, toolchain: Toolchain, kittens: ThunderKittens, out_dir: Path
) -> CompileResult:
    """Compile the device code alone to ``<out_dir>/<name>.cubin``, ungated; needs no GPU and no driver."""
    out_dir.mkdir(parents=True, exist_ok=True)
    cubin = out_dir / f"{instance.name}.cubin"
    started = time.monotonic()
    command = [*_device_command(instance, toolchain, kittens), "-cubin", "-o", str(cubin)]
    log = _run(command, f"{instance.name}: cubin")
    return CompileResult(cubin, log, time.monotonic() - started)


def _device_command(instance: Instance, toolchain: Toolchain, kittens: ThunderKittens) -> list[str]:
    root = sources.kernels_root()
    source = root / instance.source
    if not source.is_file():
        raise BuildError(f"{instance.name}: its source {source} does not exist", "reinstall tfla_tk")
    includes = [f"-I{root}", f"-I{kittens.include}"]
    flags = [*COMMON_FLAGS, *DEVICE_FLAGS, *_defines(instance), *includes]
    return [str(toolchain.nvcc), *flags, str(source)]


def _defines(instance: Instance) -> list[str]:
    return [f"-D{name}={value}" for name, value in instance.defines]


def _host_includes(toolchain: Toolchain) -> list[str]:
    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").is_file():
        raise BuildError(f"Python.h is not in {python}", "install Python's headers (python3-dev)")
    places = (sources.kernels_root(), pybind11.get_include(), python, toolchain.include)
    return [f"-I{place}" for place in places]


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
