"""The cache of compiled modules: key, verified entries, lock, atomic publication."""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pybind11

from tfla_tk import env
from tfla_tk.build import sources
from tfla_tk.build.compiler import COMMON_FLAGS, DEVICE_FLAGS, LINK_FLAGS
from tfla_tk.build.instances import Instance
from tfla_tk.build.locking import (
    check_directory,
    explain_os_errors,
    file_lock,
    private_directory,
    scratch_directory,
)
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

MANIFEST = "manifest.json"
PTXAS_LOG = "ptxas.log"
_SOURCE_SUFFIXES = {".cu", ".cuh", ".cpp", ".h", ".hpp"}


@dataclass(frozen=True)
class Entry:
    """One compiled module of the cache, and whether this call compiled it."""

    module: Path
    ptxas_log: str
    built: bool


def modules_dir() -> Path:
    """Where compiled modules are kept; the directory is the user's own."""
    return env.cache_dir() / "modules"


def cache_key(instance: Instance, toolchain: Toolchain, kittens: ThunderKittens) -> str:
    """The key of an instance: 32 hexadecimal digits.

    It changes with the instance (name, source, defines), with any file of its family's directory, of
    ``kernels/include`` and of the bindings, with ThunderKittens, with the flags (nvcc's own environment
    variables too), with the compilers, with pybind11 and with Python's ABI.
    """
    parts: list[object] = [
        [instance.name, instance.source, sorted(instance.defines)],
        [[name, digest] for name, digest in _source_digests(instance)],
        kittens.identity,
        [COMMON_FLAGS, DEVICE_FLAGS, LINK_FLAGS],
        [variable.get() for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)],
        toolchain.identity,
        pybind11.__version__,
        sysconfig.get_config_var("SOABI"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def find_entry(instance: Instance, key: str) -> Entry | None:
    """The entry of a key, or None where it is absent, truncated or altered."""
    folder = _folder(instance, key)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, object]] = manifest["files"]
        module = folder / manifest["module"]
        if manifest["key"] != key or module.name not in files or PTXAS_LOG not in files:
            return None
        if any(_fingerprint(folder / name) != recorded for name, recorded in files.items()):
            return None
        return Entry(module, (folder / PTXAS_LOG).read_text(), built=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_or_build(instance: Instance, key: str, compile_into: Callable[[Path], tuple[Path, str]]) -> Entry:
    """The entry of a key; where there is none, compile it, under a lock that other processes wait on.

    Args:
        instance, key: What to find.
        compile_into: Takes a scratch directory, leaves the module there, returns its path and the ptxas log.

    Raises:
        BuildError: The cache directory cannot be used, or ``compile_into`` raises it.
    """
    with explain_os_errors(modules_dir()):
        if modules_dir().is_dir():
            check_directory(modules_dir())
        entry = find_entry(instance, key)
        if entry is not None:
            return entry
        base = private_directory(modules_dir())
        folder = _folder(instance, key)
        with file_lock(base / f"{folder.name}.lock"), scratch_directory(base, folder.name) as scratch:
            entry = find_entry(instance, key)
            if entry is not None:
                return entry
            module, log = compile_into(scratch)
            (scratch / PTXAS_LOG).write_text(log)
            manifest = {
                "key": key,
                "module": module.name,
                "files": {name: _fingerprint(scratch / name) for name in (module.name, PTXAS_LOG)},
                "source": instance.source,
                "defines": dict(instance.defines),
            }
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
            # what stands there is broken: find_entry refused it under the lock
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
            return Entry(folder / module.name, log, built=True)


def _folder(instance: Instance, key: str) -> Path:
    return modules_dir() / f"{instance.name}-{key}"


def _fingerprint(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _source_digests(instance: Instance) -> list[tuple[str, str]]:
    root = sources.kernels_root()
    family = (root / instance.source).parent
    files = {root / instance.bindings, root / "driver_shim.cpp"}
    for place in (root / "include", family):
        files.update(path for path in place.rglob("*") if path.suffix in _SOURCE_SUFFIXES)
    return [
        (path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(files)
        if path.is_file()
    ]
