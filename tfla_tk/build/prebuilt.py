"""Kernels that come compiled with the package, in a wheel of its own kind (`make wheel`)."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfla_tk import env
from tfla_tk.build import cache, sources
from tfla_tk.build.errors import BuildError
from tfla_tk.build.instances import Instance, Launcher

FOLDER = Path(__file__).resolve().parents[1] / "_prebuilt"
INDEX = "index.json"
# who sets one of these wants kernels of his own
_OWN = (
    env.NVCC, env.THUNDERKITTENS_ROOT, env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS, env.PTXAS_GATE,
)  # fmt: skip


@dataclass(frozen=True)
class Index:
    """What the package brings.

    Attributes:
        cuda: The CUDA release that it was compiled with, as (major, minor).
        files: By the name of an artifact its key (`cache.source_key`) and its file below the folder.
    """

    cuda: tuple[int, int]
    files: dict[str, tuple[str, str]]


def index() -> Index | None:
    """What the package brings; None where it brings nothing, or where an environment variable asks for
    kernels of the user's own making."""
    return None if any(variable.get() for variable in _OWN) else _read(FOLDER)


def find(artifact: cache.Artifact) -> Path | None:
    """The compiled file of an artifact; None where the package has none of these very sources."""
    found = index()
    if found is None:
        return None
    key, file = found.files.get(cache.name_of(artifact), ("", ""))
    return FOLDER / file if key and key == _key(artifact) else None


def write(folder: Path, cuda: tuple[int, int], files: dict[cache.Artifact, Path]) -> None:
    """Puts compiled files, some of which may be one, and their index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[tuple[int, int], str] = {}
    listed: dict[str, Any] = {}
    for artifact, path in files.items():
        state = path.stat()
        # not by its own name: it may be that of the first of several that are compiled together
        own = "".join((cache.name_of(artifact), *path.suffixes))
        name = names.setdefault((state.st_dev, state.st_ino), own)
        if not (folder / name).exists():
            (folder / name).write_bytes(path.read_bytes())
        listed[cache.name_of(artifact)] = [_key(artifact), name]
    (folder / INDEX).write_text(json.dumps({"cuda": cuda, "files": listed}, indent=0))


@functools.cache
def _read(folder: Path) -> Index | None:
    try:
        told = json.loads((folder / INDEX).read_text())
        return Index(tuple(told["cuda"]), {name: (key, file) for name, (key, file) in told["files"].items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder / INDEX} cannot be read: {error}", "reinstall tfla_tk") from error


@functools.cache
def _key(artifact: Instance | Launcher | str) -> str:
    return cache.source_key(artifact, sources.thunderkittens_commit())
