"""Wrong usage of the commands' options: the error that gives status 2, and the check of paths to write to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

OUTPUTS = ("json", "csv", "plot")


class UsageError(ValueError):
    """An option has a wrong value, or options do not go together; the message names the option."""


def check_outputs(args: argparse.Namespace) -> None:
    """Whether the files of OUTPUTS that the options name can be written, to be asked before a long run.

    Raises:
        UsageError: one cannot be written.
    """
    for name in OUTPUTS:
        path: Path | None = getattr(args, name, None)
        if path is not None:
            _check_writable(f"--{name}", path)


def _check_writable(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{option}: expected a writable file, got {path} (there is no folder {path.parent})")
    is_there = os.path.lexists(path)
    try:
        path.open("a").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option}: expected a writable file, got {path} ({error.strerror})") from error
