"""A lock between processes on one file, and a private scratch directory."""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfla_tk import env
from tfla_tk.build.errors import BuildError


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (flock: it goes with the process, however that ends)."""
    import fcntl  # not on Windows, where the reference runs

    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory in ``parent``, removed at the end unless it was renamed away. The caller holds the
    lock on ``prefix``: what a killed process left under it is removed too."""
    for stale in parent.glob(f".{glob.escape(prefix)}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{prefix}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def private_directory(path: Path) -> Path:
    """Make ``path`` a directory of mode 0700 that belongs to the user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
    state = path.stat()
    if state.st_uid == os.geteuid() and state.st_mode & 0o077:
        path.chmod(0o700)
    return path


def check_directory(path: Path) -> None:
    """Refuse a directory that another user can write, root aside: its content is code that would be run.
    The user's own directory is made private where others can write it; where they can only read it, it may
    be on a file system that cannot be written."""
    state = path.stat()
    if state.st_uid == os.geteuid():
        if state.st_mode & 0o022:
            path.chmod(0o700)
    elif state.st_uid != 0 or state.st_mode & 0o022:
        raise BuildError(
            f"the cache directory {path} belongs to user id {state.st_uid}, not to you", UNUSABLE_REMEDY
        )


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about a path (permission, full disk, a file in place of a directory) into a
    BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"the cache directory {path} cannot be used: {error}", UNUSABLE_REMEDY) from error


def cache_root() -> Path:
    try:
        return env.cache_dir()
    except RuntimeError as error:
        raise BuildError(str(error), UNUSABLE_REMEDY) from error


def is_writable(path: Path) -> bool:
    """Whether files can be made in ``path``, or it can be made; nothing is written."""
    # a link that leads nowhere is in the way of a directory
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    if not os.path.isdir(path):
        raise BuildError(f"the cache directory cannot be used: {path} is not a directory", UNUSABLE_REMEDY)
    effective = os.access in os.supports_effective_ids
    return os.access(path, os.W_OK | os.X_OK, effective_ids=effective)


UNUSABLE_REMEDY = f"set {env.CACHE_DIR.name} to a directory that you own and can write"
