"""The cache of what is compiled: keys, verified entries, lock, atomic publication.

An entry is one cubin (`Instance`), one launcher's library (`Launcher`) or the extension of Python
(`EXTENSION`).
"""

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tfla_tk import env
from tfla_tk.build import compiler, locking, sources
from tfla_tk.build.compiler import DEVICE_FLAGS
from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import Instance, Launcher
from tfla_tk.build.thunderkittens import ThunderKittens
from tfla_tk.build.toolchain import Toolchain

# what is compiled; the str is EXTENSION
Artifact: TypeAlias = "Instance | Launcher | str"

MANIFEST = "manifest.json"
PTXAS_LOG = "ptxas.log"
_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include[ \t]*(.*)$", re.MULTILINE)
_INCLUDED = re.compile(rb'"([^"\n]+)"|<([^>\n]+)>')
# a string or a character, which is code, or a comment
_COMMENT = re.compile(rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One compiled file, what ptxas said of it, and whether this call compiled it."""

    file: Path
    ptxas_log: str
    built: bool


def name_of(artifact: Artifact) -> str:
    return artifact if isinstance(artifact, str) else artifact.name


def modules_dir() -> Path:
    """Where compiled modules are kept; the directory is the user's own."""
    return locking.cache_root() / "modules"


def check_cache() -> bool:
    """Whether modules can be added to the cache; False where those that it holds can only be read,
    BuildError where not even that. Nothing is written, so that a full disk is not noticed."""
    modules = modules_dir()
    with locking.explain_os_errors(modules):
        if os.path.isdir(modules):
            locking.check_directory(modules)
    if locking.is_writable(modules):
        return True
    if count_modules() == 0:
        reason = f"the cache directory {modules} cannot be written, and no kernel can be read from it"
        raise BuildError(reason, locking.UNUSABLE_REMEDY)
    return False


def count_modules() -> int:
    """How many compiled modules the cache holds, as far as it can be read."""
    modules = modules_dir()
    try:
        return sum(1 for _ in modules.glob(f"*/{MANIFEST}"))
    except OSError:
        return 0


def cache_key(artifact: Artifact, toolchain: Toolchain, kittens: ThunderKittens) -> str:
    """The key of an artifact, 32 hexadecimal digits. It changes with what it is, its sources and whatever
    file of ``kernels/`` they include, ThunderKittens, the flags (nvcc's own environment variables too),
    whether serialised kernels are taken, and the compilers. BuildError where a source cannot be read, or
    includes what a macro names."""
    flags = [variable.get() for variable in (env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS)]
    of_machine = flags, env.refuses_slow_kernels(), toolchain.identity
    return _digest_of([source_key(artifact, kittens.identity), *of_machine])


def source_key(artifact: Artifact, kittens: str) -> str:
    """A key of what an artifact is compiled from, with the identity of ThunderKittens; the same on every
    machine."""
    if isinstance(artifact, Instance):
        text = compiler.source_of([artifact]), sorted(artifact.launcher.defines)
        return _digest_of([text, _source_digests((artifact.header,)), kittens, DEVICE_FLAGS])
    if isinstance(artifact, Launcher):
        files = artifact.source, compiler.LOADER_SOURCE
        flags = compiler.LAUNCHER_FLAGS, compiler.HOST_FLAGS, compiler.LINK_FLAGS
        return _digest_of([sorted(artifact.defines), _source_digests(files), kittens, flags])
    return _digest_of([_source_digests((compiler.EXTENSION_SOURCE,)), compiler.HOST_FLAGS])


def headers_of(artifacts: Iterable[Artifact]) -> list[str]:
    """Where the kernels are from that are compiled together, to one file."""
    return sorted({artifact.header for artifact in artifacts if isinstance(artifact, Instance)})


def headers_key(headers: Iterable[str]) -> str:
    """A key of their content. A file is taken only where none of its kernels has changed: it would bring
    their old code into the process."""
    return _digest_of([_source_digests(headers)])


def _digest_of(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def find_entry(artifact: Artifact, key: str) -> Entry | None:
    """The entry of a key, or None where it is absent, truncated or altered, or where kernels that were
    compiled together with it have changed."""
    folder = _folder(artifact, key)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, object]] = manifest["files"]
        file = folder / manifest["file"]
        if manifest["key"] != key or file.name not in files or PTXAS_LOG not in files:
            return None
        if any(_fingerprint(folder / name) != recorded for name, recorded in files.items()):
            return None
        if headers_key(manifest["headers"]) != manifest["sources"]:
            return None
        return Entry(file, (folder / PTXAS_LOG).read_text(), built=False)
    except (BuildError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_or_build(
    wanted: dict[Artifact, str], compile_into: Callable[[list[Artifact], Path], tuple[Path, str]]
) -> dict[Artifact, Entry]:
    """The entries of artifacts by their keys; those that there are none of are compiled together, to one
    file, under a lock that other processes wait on. wanted: What to find, with its key. compile_into:
    Takes what to compile and a scratch directory, leaves the file there, returns its path and the ptxas
    log."""
    modules = modules_dir()
    with locking.explain_os_errors(modules):
        if modules.is_dir():
            locking.check_directory(modules)
        found = _entries(wanted)
        if len(found) == len(wanted):
            return found
        base = locking.private_directory(modules)
        lock = _folder(*next(iter(wanted.items()))).name
        with locking.file_lock(base / f"{lock}.lock"), locking.scratch_directory(base, lock) as scratch:
            found = _entries(wanted)
            missing = [artifact for artifact in wanted if artifact not in found]
            if missing:
                file, log = compile_into(missing, scratch)
                (scratch / PTXAS_LOG).write_text(log)
                headers = headers_of(missing)
                for artifact in missing:
                    found[artifact] = _publish(artifact, wanted[artifact], file, log, headers)
            return found


def _entries(wanted: dict[Artifact, str]) -> dict[Artifact, Entry]:
    entries = ((artifact, find_entry(artifact, key)) for artifact, key in wanted.items())
    return {artifact: entry for artifact, entry in entries if entry is not None}


def _publish(artifact: Artifact, key: str, file: Path, log: str, headers: list[str]) -> Entry:
    """An entry of a compiled file, which others may share, made in one step. headers: of all kernels in
    the file."""
    folder = _folder(artifact, key)
    prefix = f"{folder.name}-new"
    with (
        locking.file_lock(folder.parent / f"{prefix}.lock"),
        locking.scratch_directory(folder.parent, prefix) as scratch,
    ):
        standing = find_entry(artifact, key)
        if standing is not None:  # by a compilation together with others; it may be in use
            return standing
        try:
            os.link(file, scratch / file.name)
        except OSError:  # a file system without links
            shutil.copy2(file, scratch / file.name)
        (scratch / PTXAS_LOG).write_text(log)
        manifest = {
            "key": key,
            "name": name_of(artifact),
            "file": file.name,
            "files": {name: _fingerprint(scratch / name) for name in (file.name, PTXAS_LOG)},
            "headers": headers,
            "sources": headers_key(headers),
        }
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():  # and is broken, or has old code of other kernels
            shutil.rmtree(folder)
        scratch.rename(folder)
    return Entry(folder / file.name, log, built=True)


def _folder(artifact: Artifact, key: str) -> Path:
    return modules_dir() / f"{name_of(artifact)}-{key}"


def _fingerprint(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _source_digests(files: Iterable[str]) -> list[tuple[str, str]]:
    """Files of ``kernels/`` and what they include of it, with the digest of their code."""
    root = sources.kernels_root()
    found: dict[str, str] = {}
    pending = [root / file for file in files]
    while pending:
        path = pending.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        state = path.stat() if path.exists() else None
        found[name], includes = _scanned(path, state and (state.st_mtime_ns, state.st_size))
        for include in includes:
            pending += _found(include, path.parent, root)
    return sorted(found.items())


# what an include has between quotes, and between brackets
Include: TypeAlias = tuple[bytes, bytes]


@functools.lru_cache(maxsize=1024)
def _scanned(path: Path, state: tuple[int, int] | None) -> tuple[str, list[Include]]:
    """The digest of a file in this state, without comments and blank lines, and its includes. A condition
    around an include does not count."""
    content = sources.read(path)
    includes = []
    for line in _INCLUDE.findall(content):
        match = _INCLUDED.match(line)
        if match is None:
            text = line.decode(errors="replace").strip()
            raise BuildError(f"{path}: the include of {text!r} cannot be followed", "name the file itself")
        quoted, bracketed = match.groups()
        includes.append((quoted, bracketed))
    return hashlib.sha256(_code_of(content)).hexdigest(), includes


def _code_of(source: bytes) -> bytes:
    """A source without its comments, blank lines and blanks at the ends of lines."""
    lines = _COMMENT.sub(lambda found: found[1] or b" ", source).splitlines()
    return b"\n".join(line.rstrip() for line in lines if line.strip())


def _found(include: Include, folder: Path, root: Path) -> list[Path]:
    """The file of ``kernels/`` that an include in a file of this folder is of, found as nvcc finds it.
    What is not found there belongs to ThunderKittens, CUDA, Python or the compiler, which are in the key
    by their versions."""
    quoted, bracketed = include
    for place in ([folder] if quoted else []) + [root]:
        # not `resolve`: kernels/ may be a link, or hold some
        path = Path(os.path.normpath(place / (quoted or bracketed).decode()))
        if path.is_relative_to(root) and os.path.isfile(path):
            return [path]
    return []
