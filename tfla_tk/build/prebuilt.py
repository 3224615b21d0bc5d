"""Kernels that come compiled with the package, in a wheel of its own kind (`make wheel`)."""

import dataclasses
import functools
import json
from pathlib import Path

from tfla_tk import env
from tfla_tk.build import cache, sources
from tfla_tk.build.errors import BuildError

FOLDER = Path(__file__).resolve().parents[1] / "_prebuilt"
INDEX = "index.json"
# who sets one of these wants kernels of his own
_OWN = (
    env.NVCC, env.THUNDERKITTENS_ROOT, env.NVCC_PREPEND_FLAGS, env.NVCC_APPEND_FLAGS, env.PTXAS_GATE,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Index:
    """What the package brings."""

    cuda: tuple[int, int]  # the CUDA release that it was compiled with, as (major, minor)
    keys: dict[str, str]  # by the name of an artifact its key (`cache.source_key`)
    files: dict[str, str]  # by the name of an artifact its file below the folder, which others may share
    # by the name of a file the headers of its kernels, and their key
    sources: dict[str, tuple[list[str], str]]


def index() -> Index | None:
    """What the package brings; None where it brings nothing, or where an environment variable asks for
    kernels of the user's own making."""
    return None if any(variable.get() for variable in _OWN) else _read(FOLDER)


def find(artifact: cache.Artifact) -> Path | None:
    """The compiled file of an artifact; None where the package has none of these very sources, or where
    kernels that were compiled together with it have changed."""
    found, name = index(), cache.name_of(artifact)
    if found is None or found.keys.get(name) != _key(artifact):
        return None
    file = found.files[name]
    headers, key = found.sources[file]
    return FOLDER / file if _headers_key(tuple(headers)) == key else None


def write(folder: Path, cuda: tuple[int, int], files: dict[cache.Artifact, Path]) -> None:
    """Puts compiled files, some of which may be one, and their index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    together: dict[tuple[int, int], list[cache.Artifact]] = {}
    for artifact, path in files.items():
        state = path.stat()
        together.setdefault((state.st_dev, state.st_ino), []).append(artifact)
    told = Index(cuda, {}, {}, {})
    for artifacts in together.values():
        path = files[artifacts[0]]
        # not by its own name: that is of the first of several that were compiled together
        file = "".join((cache.name_of(artifacts[0]), *path.suffixes))
        (folder / file).write_bytes(path.read_bytes())
        headers = cache.headers_of(artifacts)
        told.sources[file] = headers, _headers_key(tuple(headers))
        for artifact in artifacts:
            name = cache.name_of(artifact)
            told.keys[name], told.files[name] = _key(artifact), file
    (folder / INDEX).write_text(json.dumps(dataclasses.asdict(told), indent=0))


@functools.cache
def _read(folder: Path) -> Index | None:
    try:
        told = json.loads((folder / INDEX).read_text())
        return Index(**told | {"cuda": tuple(told["cuda"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder / INDEX} cannot be read: {error}", "reinstall tfla_tk") from error


_headers_key = functools.cache(cache.headers_key)
_key = functools.cache(lambda artifact: cache.source_key(artifact, sources.thunderkittens_commit()))
