"""The cache of compiled modules: key, verified entries, lock, atomic publication."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pybind11

from tfla_tk import env
from tfla_tk.build import sources
from tfla_tk.build.compiler import COMMON_FLAGS, DEVICE_FLAGS, LINK_FLAGS
from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import Instance
from tfla_tk.build.locking import (
    UNUSABLE_REMEDY,
    cache_root,
    check_directory,
    explain_os_errors,
    file_lock,
    is_writable,
    private_directory,
    scratch_directory,
)
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

MANIFEST = "manifest.json"
PTXAS_LOG = "ptxas.log"
_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*(.*)$", re.MULTILINE)
_INCLUDED = re.compile(rb'"([^"\n]+)"|<([^>\n]+)>')


@dataclass(frozen=True)
class Entry:
    """One compiled module of the cache, and whether this call compiled it."""

    module: Path
    ptxas_log: str
    built: bool


def modules_dir() -> Path:
    """Where compiled modules are kept; the directory is the user's own.

    Raises:
        BuildError: There is no home directory for the cache.
    """
    return cache_root() / "modules"


def check_cache() -> bool:
    """Whether modules can be added to the cache; False where those that it holds can only be read.

    Nothing is written, so that a full disk is not noticed.

    Raises:
        BuildError: The cache directory can be neither written nor read.
    """
    modules = modules_dir()
    with explain_os_errors(modules):
        if os.path.isdir(modules):
            check_directory(modules)
    if is_writable(modules):
        return True
    if count_modules() == 0:
        reason = f"the cache directory {modules} cannot be written, and no kernel can be read from it"
        raise BuildError(reason, UNUSABLE_REMEDY)
    return False


def count_modules() -> int:
    """How many compiled modules the cache holds, as far as it can be read."""
    modules = modules_dir()
    try:
        return sum(1 for _ in modules.glob(f"*/{MANIFEST}"))
    except OSError:
        return 0


def cache_key(instance: Instance, toolchain: Toolchain, kittens: ThunderKittens) -> str:
    """The key of an instance: 32 hexadecimal digits.

    It changes with the instance (name, source, defines), with its source, its bindings and whatever file of
    ``kernels/`` they include, with ThunderKittens, with the flags (nvcc's own environment variables too) and
    whether ptxas's complaints count, with the compilers, with pybind11 and with Python's ABI.

    Raises:
        BuildError: A source cannot be read, or includes what a macro names.
    """
    parts: list[object] = [
        *_sources_of(instance, kittens),
        [COMMON_FLAGS, DEVICE_FLAGS, LINK_FLAGS],
        [variable.get() for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)],
        env.refuses_slow_kernels(),
        toolchain.identity,
        pybind11.__version__,
        sysconfig.get_config_var("SOABI"),
    ]
    return _digest_of(parts)


def source_key(instance: Instance, kittens: ThunderKittens) -> str:
    """A key of what an instance is compiled from, the same on every machine.

    That is `cache_key` without the compilers, the environment's flags and Python.

    Raises:
        BuildError: A source cannot be read, or includes what a macro names.
    """
    return _digest_of([*_sources_of(instance, kittens), [COMMON_FLAGS, DEVICE_FLAGS]])


def _sources_of(instance: Instance, kittens: ThunderKittens) -> list[object]:
    return [
        [instance.name, instance.source, sorted(instance.defines)],
        [[name, digest] for name, digest in _source_digests(instance)],
        kittens.identity,
    ]


def _digest_of(parts: list[object]) -> str:
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
    modules = modules_dir()
    with explain_os_errors(modules):
        if modules.is_dir():
            check_directory(modules)
        entry = find_entry(instance, key)
        if entry is not None:
            return entry
        base = private_directory(modules)
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
    """Every file of ``kernels/`` that the module is made of, with the digest of its content."""
    root = sources.kernels_root()
    found: dict[str, str] = {}
    pending = [root / instance.source, root / instance.bindings, root / "common/driver_shim.cpp"]
    while pending:
        path = pending.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        content = sources.read(path)
        found[name] = hashlib.sha256(content).hexdigest()
        pending += _included(path, content, root)
    return sorted(found.items())


def _included(path: Path, content: bytes, root: Path) -> list[Path]:
    """The files below ``kernels/`` that a file includes, found as nvcc finds them.

    A condition around an include does not count, nor does a comment. What is not found there belongs to
    ThunderKittens, CUDA, pybind11 or the compiler, which are in the key by their versions.
    """
    found = []
    for line in _INCLUDE.findall(content):
        match = _INCLUDED.match(line)
        if match is None:
            text = line.decode(errors="replace").strip()
            raise BuildError(f"{path}: the include of {text!r} cannot be followed", "name the file itself")
        quoted, bracketed = match.groups()
        name = (quoted or bracketed).decode()
        places = ([path.parent] if quoted else []) + [root]
        for place in places:
            # not `resolve`: kernels/ may be a link, or hold some
            included = Path(os.path.normpath(place / name))
            if included.is_relative_to(root) and os.path.isfile(included):
                found.append(included)
                break
    return found
