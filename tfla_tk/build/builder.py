"""Loading and compiling instances: what the backends, the command line and the tests call."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from tfla_tk import env
from tfla_tk.build import cache
from tfla_tk.build.compiler import CompileResult, Slots, compile_module, compile_to_cubin
from tfla_tk.build.errors import BuildError, CaptureError
from tfla_tk.build.exports import check_exports
from tfla_tk.build.instances import Instance, shipped_instances
from tfla_tk.build.thunderkittens import find_thunderkittens
from tfla_tk.build.toolchain import find_toolchain

_log = logging.getLogger("tfla_tk.build")
_loaded: dict[Instance, ModuleType] = {}
_load_lock = threading.Lock()


@dataclass(frozen=True)
class Built:
    """One instance that ``ensure`` has brought into the cache.

    Attributes:
        instance: What was asked for.
        module: The compiled module.
        ptxas_log: Registers and memory per kernel: ``parse_ptxas_log`` reads it.
        compiled: False where the cache held it already.
        seconds: Time spent on it.
    """

    instance: Instance
    module: Path
    ptxas_log: str
    compiled: bool
    seconds: float


def cache_key(instance: Instance) -> str:
    """The cache key of an instance under the present environment.

    Raises:
        BuildError: There is no nvcc or no ThunderKittens.
    """
    return cache.cache_key(instance, find_toolchain(), find_thunderkittens())


def is_cached(instance: Instance) -> bool:
    """Whether the cache holds the module of an instance; nothing is compiled or fetched.

    Raises:
        BuildError: There is no nvcc or no ThunderKittens, or the sources cannot be read.
    """
    if instance in _loaded:
        return True
    key = cache.cache_key(instance, find_toolchain(), find_thunderkittens(clone=False))
    return cache.find_entry(instance, key) is not None


def load(instance: Instance) -> ModuleType:
    """The Python module of an instance, compiled now where the cache lacks it.

    The first call of a process checks the cache; later ones return the same module.

    Raises:
        BuildError: No nvcc, no ThunderKittens, an unusable cache directory, a failed compilation, a refusal
            by the ptxas gate, a module that disagrees with this package (`exports`).
        CaptureError: A CUDA graph is being captured and the module would have to be compiled.
    """
    module = _loaded.get(instance)
    if module is not None:
        return module
    with _load_lock:
        if instance not in _loaded:
            entry = _build(instance, Slots(env.build_jobs()), announce=True)
            module = _import(instance.name, entry.module)
            check_exports(instance, module)
            _loaded[instance] = module
        return _loaded[instance]


def ensure(
    instances: Iterable[Instance],
    jobs: int | None = None,
    progress: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Compile every instance that the cache lacks, in parallel.

    Args:
        instances: What to compile.
        jobs: Compiler processes at a time; TFLA_TK_JOBS or the CPU cores by default.
        progress: Called from this thread with each ``Built`` as it is done.

    Returns:
        One ``Built`` per instance, in their order.

    Raises:
        BuildError: Some could not be built; the others are in the cache all the same.
        ValueError: ``jobs`` is not positive.
    """
    jobs = env.build_jobs() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs: expected a positive number, got {jobs}")
    slots = Slots(jobs)
    wanted = list(instances)
    done: dict[Instance, Built] = {}
    errors: list[BuildError] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [pool.submit(_timed_build, instance, slots) for instance in wanted]
        try:
            for future in as_completed(running):
                try:
                    built = future.result()
                except BuildError as error:
                    errors.append(error)
                    continue
                done[built.instance] = built
                if progress is not None:
                    progress(built)
        except BaseException:  # also an interrupt: what has not begun does not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        reasons = "\n".join(dict.fromkeys(error.reason for error in errors))
        raise BuildError(
            f"{len(errors)} of {len(wanted)} kernels were not built\n{reasons}", errors[0].remedy
        )
    return [done[instance] for instance in wanted]


def compile_cubin(instance: Instance, out_dir: Path) -> CompileResult:
    """Compile the device code of an instance to ``<out_dir>/<name>.cubin``; needs no GPU and no driver.

    The ptxas log is returned unjudged: ``check_ptxas_log`` is the gate.

    Raises:
        BuildError: No nvcc, no ThunderKittens, or a failed compilation.
    """
    return compile_to_cubin(instance, find_toolchain(), find_thunderkittens(), out_dir)


def _timed_build(instance: Instance, slots: Slots) -> Built:
    started = time.monotonic()
    entry = _build(instance, slots, announce=False)
    return Built(instance, entry.module, entry.ptxas_log, entry.built, time.monotonic() - started)


def _build(instance: Instance, slots: Slots, announce: bool) -> cache.Entry:
    toolchain = find_toolchain()
    kittens = find_thunderkittens(clone=not _capturing())

    def compile_into(scratch: Path) -> tuple[Path, str]:
        if _capturing():
            raise CaptureError(
                f"{instance.name} would have to be compiled while a CUDA graph is being captured",
                "call the operator once before the capture, or run "
                + ("`tfla-tk build`" if instance in shipped_instances() else "`tfla-tk build --all`"),
            )
        if announce:
            _log.warning("compiling %s on first use; it is kept in %s", instance.name, cache.modules_dir())
        return compile_module(instance, toolchain, kittens, scratch, slots)

    return cache.find_or_build(instance, cache.cache_key(instance, toolchain, kittens), compile_into)


def _capturing() -> bool:
    """Whether the current stream is being captured; never initialises CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _import(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is no module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} was built but does not import: {error}") from error
    return module
