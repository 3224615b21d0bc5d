"""A lock between processes on one file, and a private scratch directory."""

from __future__ import annotations

import contextlib
import fcntl
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
    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory in ``parent``, removed at the end unless it was renamed away.

    The caller holds the lock on ``prefix``: what a killed process left under it is removed too.
    """
    for stale in parent.glob(f".{glob.escape(prefix)}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{prefix}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def private_directory(path: Path) -> Path:
    """Make ``path`` a directory of mode 0700 that belongs to the user.

    Raises:
        BuildError: Another user owns it: its content is code that would be run.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = path.stat()
    if state.st_uid != os.geteuid():
        raise BuildError(f"the cache directory {path} belongs to user id {state.st_uid}, not to you", _REMEDY)
    if state.st_mode & 0o077:
        path.chmod(0o700)
    return path


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError (permission, full disk, a file in place of a directory) into a BuildError."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"the cache directory {path} cannot be used: {error}", _REMEDY) from error


_REMEDY = f"set {env.CACHE_DIR.name} to a directory that you own and can write"
