"""Loading and compiling kernels: what the backends, the command line and the tests call."""

import functools
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from tfla_tk import env
from tfla_tk.build import cache, compiler, prebuilt
from tfla_tk.build.cache import Artifact, name_of
from tfla_tk.build.compiler import EXTENSION, CompileResult, Slots
from tfla_tk.build.errors import BuildError, CaptureError
from tfla_tk.build.gate import SerialisedError, check_serialised, ptxas_faults
from tfla_tk.build.instances import Instance, Launcher, check_exports
from tfla_tk.build.thunderkittens import ThunderKittens, find_thunderkittens
from tfla_tk.build.toolchain import Toolchain, find_toolchain

_log = logging.getLogger("tfla_tk.build")
_MOST_OF_A_BUNDLE = 16  # kernels
_SILENT_S = 2.0
_launchers: dict[Launcher, ModuleType] = {}
_attached: dict[Launcher, frozenset[Instance]] = {}
_loaded_files: set[tuple[Launcher, int, int, int]] = set()  # by device, inode and time
_files: dict[Artifact, Path] = {}  # that this process has found or compiled
_load_lock = threading.Lock()


@dataclass(frozen=True)
class Built:
    """What ``ensure`` has brought into the cache: instances that are one compilation, a launcher, or the
    extension."""

    files: dict[Artifact, Path]  # what was asked for, and the file of each
    ptxas_log: str  # registers and memory per kernel: ``parse_ptxas_log`` reads it
    compiled: bool  # False where the cache held all of it already
    seconds: float  # spent on it


def cache_key(artifact: Artifact) -> str:
    """The cache key of an artifact under the present environment; BuildError without nvcc or
    ThunderKittens."""
    return cache.cache_key(artifact, find_toolchain(), find_thunderkittens())


def is_cached(artifact: Artifact) -> bool:
    """Whether an artifact is there; nothing is compiled or fetched. BuildError as of `cache_key`."""
    if artifact in _files or prebuilt.find(artifact) is not None:
        return True
    key = cache.cache_key(artifact, find_toolchain(), find_thunderkittens(clone=False))
    return cache.find_entry(artifact, key) is not None


def load(launcher: Launcher, *instances: Instance) -> ModuleType:
    """The functions and constants of a launcher, once it can launch these instances; compiled now where
    the cache lacks them, side by side. The first call of a process checks the cache; later ones return the
    same module. BuildError: No nvcc, no ThunderKittens, an unusable cache directory, a failed compilation,
    a kernel that the user's ptxas serialises, a launcher that disagrees with this package (`exports`).
    CaptureError: A CUDA graph is being captured and something would have to be compiled."""
    module = _launchers.get(launcher)
    if module is not None and _attached[launcher].issuperset(instances):
        return module
    with _load_lock:
        artifacts: list[Artifact] = [EXTENSION, launcher, *instances]
        try:
            _build_for_a_call([artifact for artifact in artifacts if artifact not in _files])
            if launcher not in _launchers:
                _attached[launcher] = frozenset()
                _launchers[launcher] = _opened(_extension(), launcher)
            for instance in instances:
                if instance not in _attached[launcher]:
                    _load_kernels(launcher, _files[instance])
            _attached[launcher] |= frozenset(instances)
        except BuildError:
            _files.clear()  # another try looks for them again: the cache may have been emptied
            raise
        return _launchers[launcher]


def ensure(
    artifacts: Iterable[Artifact], jobs: int | None = None, progress: Callable[[Built], None] | None = None
) -> list[Built]:
    """Compile every artifact that the cache lacks, in parallel; instances of one launcher and dtype
    together, a few at a time, which takes less time than each by itself.

    Args:
        artifacts: What to compile.
        jobs: Compiler processes at a time; TFLA_TK_JOBS or the CPU cores by default.
        progress: Called from this thread with each ``Built`` as it is done.

    Raises:
        BuildError: Some could not be built; the others are in the cache all the same.
        ValueError: ``jobs`` is not positive.
    """
    jobs = env.build_jobs() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs: expected a positive number, got {jobs}")
    done: list[Built] = []
    errors: list[BuildError] = []
    for result in _in_parallel(_bundles(artifacts), jobs):
        if isinstance(result, BuildError):
            errors.append(result)
            continue
        done.append(result)
        if progress is not None:
            progress(result)
    if errors:
        reasons = "\n".join(dict.fromkeys(error.reason for error in errors))
        raise BuildError(f"{len(errors)} compilations failed\n{reasons}", errors[0].remedy)
    return done


def compile_instance(instance: Instance, out_dir: Path) -> CompileResult:
    """Compile an instance to ``<out_dir>/<name>.cubin``; needs no GPU and no driver. The ptxas log is
    returned unjudged: ``check_ptxas_log`` judges it. BuildError: No nvcc, no ThunderKittens, or a failed
    compilation."""
    toolchain, kittens = find_toolchain(), find_thunderkittens()
    out_dir.mkdir(parents=True, exist_ok=True)
    cubin = out_dir / f"{instance.name}.cubin"
    started = time.monotonic()
    log = compiler.compile_cubin([instance], toolchain, kittens, cubin, Slots(1))
    return CompileResult(cubin, log, time.monotonic() - started)


def launches(prepared: Sequence[Any]) -> Callable[[list[int], int], None]:
    """What runs prepared launches one after the other, from where the tensors of a call begin and the
    stream."""
    return _extension().launches(prepared)


def _bundles(artifacts: Iterable[Artifact]) -> list[list[Artifact]]:
    """What is compiled together: instances with the same launcher and dtype, up to so many kernels."""
    alone: list[list[Artifact]] = []
    together: dict[Any, list[Artifact]] = {}
    for artifact in artifacts:
        if not isinstance(artifact, Instance):
            alone.append([artifact])
            continue
        key = artifact.launcher, artifact.dtype
        bundle = together.setdefault(key, [])
        kernels = sum(len(x.kernels) for x in bundle if isinstance(x, Instance))
        if kernels + len(artifact.kernels) > _MOST_OF_A_BUNDLE:
            alone.append(together.pop(key))
            bundle = together.setdefault(key, [])
        bundle.append(artifact)
    return [bundle for bundle in (*alone, *together.values()) if bundle]


def _in_parallel(bundles: list[list[Artifact]], jobs: int) -> Iterable[Built | BuildError]:
    """Brings bundles into the cache; each result as it is done."""
    if not bundles:
        return
    capturing = _capturing()  # asked here: the threads of the pool have streams of their own
    toolchain, kittens = find_toolchain(), find_thunderkittens(clone=not capturing)
    slots = Slots(jobs)
    with ThreadPoolExecutor(max_workers=len(bundles)) as pool:
        running = [pool.submit(_results, bundle, toolchain, kittens, slots, capturing) for bundle in bundles]
        try:
            for future in as_completed(running):
                yield from future.result()
        except BaseException:  # also an interrupt: what has not begun does not begin
            slots.close()
            raise


def _build_for_a_call(artifacts: list[Artifact]) -> None:
    """Finds or compiles what a call needs, and shows what takes long."""
    for artifact in artifacts:
        found = prebuilt.find(artifact)
        if found is not None:
            _files[artifact] = found
    bundles: list[list[Artifact]] = [[artifact] for artifact in artifacts if artifact not in _files]
    if not bundles:
        return
    jobs = env.build_jobs()
    with _Progress(len(bundles), jobs, str(cache.modules_dir())) as progress:
        for result in _in_parallel(bundles, jobs):
            if isinstance(result, BuildError):
                raise result
            progress.advance()


class _Progress:
    """Counts what is compiled; silent where that takes less than two seconds. total: how many files are
    compiled. jobs: compiler processes at a time. kept: where they are kept."""

    def __init__(self, total: int, jobs: int, kept: str) -> None:
        self._total, self._jobs, self._kept, self._done = total, jobs, kept, 0
        self._started = time.monotonic()
        self._shown = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(_SILENT_S, self._announce)
        self._timer.daemon = True

    def __enter__(self) -> "_Progress":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown and kind is None:
                self._write(f"compiled in {time.monotonic() - self._started:.0f} s", end="\n")

    def advance(self) -> None:
        with self._lock:
            self._done += 1
            if self._shown and sys.stderr.isatty():
                self._write(f"{self._done} of {self._total} compiled", end="")

    def _announce(self) -> None:
        with self._lock:
            self._shown = True
            self._write(
                f"compiling {self._total} files for the first call of this kind, {self._jobs} at a time; "
                f"they are kept in {self._kept} (`tfla-tk build` compiles all kernels before)",
                end="\n",
            )
            if self._done and sys.stderr.isatty():
                self._write(f"{self._done} of {self._total} compiled", end="")

    def _write(self, text: str, end: str) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}tfla_tk: {text}", end=end, file=sys.stderr, flush=True)


def _results(bundle: list[Artifact], *machine: Any) -> list[Built | BuildError]:
    """What comes of a bundle; of one with a kernel that is refused, what comes of each by itself."""
    try:
        return [_timed_build(bundle, *machine)]
    except SerialisedError as error:
        alone = [] if len(bundle) == 1 else [_results([artifact], *machine) for artifact in bundle]
        return [result for results in alone for result in results] or [error]
    except BuildError as error:
        return [error]


def _timed_build(
    bundle: list[Artifact], toolchain: Toolchain, kittens: ThunderKittens, slots: Slots, capturing: bool
) -> Built:
    started = time.monotonic()

    def compile_into(missing: list[Artifact], scratch: Path) -> tuple[Path, str]:
        if capturing:
            raise CaptureError(
                f"{name_of(missing[0])} would have to be compiled while a CUDA graph is being captured",
                "call the operator once before the capture, or run `tfla-tk build`",
            )
        return _compiled(missing, toolchain, kittens, scratch, slots)

    keys = {artifact: cache.cache_key(artifact, toolchain, kittens) for artifact in bundle}
    entries = cache.find_or_build(keys, compile_into)
    files = {artifact: entries[artifact].file for artifact in bundle}
    _files.update(files)
    compiled = any(entry.built for entry in entries.values())
    return Built(files, entries[bundle[0]].ptxas_log, compiled, time.monotonic() - started)


def _compiled(
    artifacts: list[Artifact], toolchain: Toolchain, kittens: ThunderKittens, scratch: Path, slots: Slots
) -> tuple[Path, str]:
    """Compiles artifacts to one file; its path and the ptxas log."""
    first = artifacts[0]
    if isinstance(first, Launcher):
        library = scratch / f"{first.name}.so"
        compiler.compile_launcher(first, toolchain, kittens, library, slots)
        return library, ""
    if not isinstance(first, Instance):
        library = scratch / f"{first}.abi3.so"
        compiler.compile_extension(toolchain, library, slots)
        return library, ""
    instances = [artifact for artifact in artifacts if isinstance(artifact, Instance)]
    cubin = scratch / f"{first.name}.cubin"
    log = compiler.compile_cubin(instances, toolchain, kittens, cubin, slots)
    if env.refuses_slow_kernels():
        check_serialised(log, first.name, toolchain.identity)
    for fault in ptxas_faults(log):
        _log.warning("%s, compiled by %s: %s", first.name, toolchain.identity, fault)
    return cubin, log


def _capturing() -> bool:
    """Whether the current stream is being captured; never initialises CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _load_kernels(launcher: Launcher, cubin: Path) -> None:
    """Once for all instances that are compiled to one file."""
    try:
        state = cubin.stat()
        file = launcher, state.st_dev, state.st_ino, state.st_mtime_ns
        if file not in _loaded_files:
            _launchers[launcher].load_kernels(os.fspath(cubin))
            _loaded_files.add(file)
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{cubin} was built but does not load: {error}") from error


@functools.cache
def _extension() -> ModuleType:
    if EXTENSION not in _files:
        _build_for_a_call([EXTENSION])
    path = _files[EXTENSION]
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION, os.fspath(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is no module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} was built but does not import: {error}") from error
    return module


def _opened(extension: ModuleType, launcher: Launcher) -> ModuleType:
    """A launcher's functions and constants, and `load_kernels`."""
    try:
        functions, told = extension.open(os.fspath(_files[launcher]))
    except RuntimeError as error:
        raise BuildError(f"{_files[launcher]} was built but does not load: {error}") from error
    constants: dict[str, Any] = {}
    for name, value in told.items():
        outer, _, inner = name.partition(".")
        if inner:
            constants.setdefault(outer, {})[inner] = value
        else:
            constants[outer] = value
    check_exports(launcher, constants)
    module = ModuleType(launcher.name)
    module.__dict__.update(constants, **functions)
    return module
