"""The look-up of ThunderKittens: THUNDERKITTENS_ROOT, the cache, a clone of the pinned commit."""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tfla_tk import env
from tfla_tk.build import locking, sources
from tfla_tk.build.errors import BuildError

URL = "https://github.com/HazyResearch/ThunderKittens.git"
_HEADER = Path("include/kittens.cuh")
_CLONE_TIMEOUT_S = 600


@dataclass(frozen=True)
class ThunderKittens:
    """A ThunderKittens tree. root: Its top directory; the headers lie in ``root / "include"``. identity:
    The pinned commit, or for a tree of the user's a digest of its headers; in the cache key. origin: Which
    look-up found it."""

    root: Path
    identity: str
    origin: str

    @property
    def include(self) -> Path:
        return self.root / "include"


def find_thunderkittens(clone: bool = True) -> ThunderKittens:
    """The first of THUNDERKITTENS_ROOT, the cached tree and a fresh clone of the pinned commit. clone:
    Whether the third look-up may go to the network. BuildError: None is there, THUNDERKITTENS_ROOT holds
    no ThunderKittens, or another user's cache does."""
    commit = sources.thunderkittens_commit()
    chosen = env.THUNDERKITTENS_ROOT.get()
    if chosen:
        return _chosen(chosen, commit)
    root = cached_root(commit)
    with locking.explain_os_errors(root.parent):
        if (root / _HEADER).is_file():
            locking.check_directory(root.parent)
            return ThunderKittens(root, commit, "cache")
    if not clone:
        raise _not_found(commit, root, "git clone: not tried here")
    _clone(commit, root)
    return ThunderKittens(root, commit, "git clone")


def cached_root(commit: str) -> Path:
    """Where the pinned commit is kept; BuildError where there is no home directory for the cache."""
    return locking.cache_root() / "thunderkittens" / commit


def _chosen(place: str, commit: str) -> ThunderKittens:
    remedy = f"point it at a ThunderKittens checkout (commit {commit}) or unset it"
    name = env.THUNDERKITTENS_ROOT.name
    try:
        root = Path(place).expanduser().absolute()
        if not (root / _HEADER).is_file():
            raise BuildError(f"{name}={place} holds no {_HEADER}", remedy)
        return ThunderKittens(root, _headers_digest(root / "include"), name)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        if isinstance(error, BuildError):
            raise
        raise BuildError(f"{name}={place} cannot be read: {error}", remedy) from error


def _headers_digest(include: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in include.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(include)}:{len(content)}:".encode())
        digest.update(content)
    return f"headers {digest.hexdigest()}"


def _clone(commit: str, root: Path) -> None:
    chosen = env.THUNDERKITTENS_URL.get()
    url, origin = chosen or URL, f"{env.THUNDERKITTENS_URL.name}={chosen}" if chosen else URL
    with locking.explain_os_errors(root.parent):
        locking.private_directory(root.parent)
        with (
            locking.file_lock(root.parent / f"{commit}.lock"),
            locking.scratch_directory(root.parent, commit) as scratch,
        ):
            if (root / _HEADER).is_file():
                return
            tree = scratch / "tree"
            steps = (
                ["init", "--quiet", str(tree)],
                ["-C", str(tree), "fetch", "--quiet", "--depth", "1", url, commit],
                ["-C", str(tree), "-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
            )
            for step in steps:
                _git(step, commit, root, origin)
            if not (tree / _HEADER).is_file():
                raise _not_found(commit, root, f"git clone: {origin} has no {_HEADER} at that commit")
            if root.exists():
                shutil.rmtree(root)
            tree.rename(root)


def _git(arguments: list[str], commit: str, root: Path, origin: str) -> None:
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, env=quiet, timeout=_CLONE_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise _not_found(commit, root, "git clone: git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise _not_found(
            commit, root, f"git clone: {origin} did not answer in {_CLONE_TIMEOUT_S} s"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["failed"]
        fault = next((line for line in lines if line.startswith("fatal:")), lines[-1])
        raise _not_found(commit, root, f"git clone of {origin}: {fault}")


def _not_found(commit: str, root: Path, clone_fault: str) -> BuildError:
    url = env.THUNDERKITTENS_URL
    fix = f"correct or unset {url.name}; " if url.get() else ""
    return BuildError(
        "ThunderKittens was not found by any of the three look-ups:\n"
        f"  1. {env.THUNDERKITTENS_ROOT.name}: not set\n"
        f"  2. the cache: no {_HEADER} in {root}\n"
        f"  3. {clone_fault}",
        f"{fix}run `tfla-tk build`, which fetches it; on a machine without network, copy a ThunderKittens "
        f"checkout (commit {commit}) here, and set {env.THUNDERKITTENS_ROOT.name} to it or put it at {root}",
    )
