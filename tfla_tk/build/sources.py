"""Where the kernel sources lie, and the ThunderKittens commit they are written for."""

from __future__ import annotations

from pathlib import Path

import tfla_tk
from tfla_tk.build.errors import BuildError

COMMIT_FILE = "THUNDERKITTENS_COMMIT"


def kernels_root() -> Path:
    """The kernel sources: ``kernels/`` of a checkout, ``tfla_tk/_kernels`` of an installed wheel.

    Raises:
        BuildError: Neither is there.
    """
    package = Path(tfla_tk.__file__).resolve().parent
    places = (package.parent / "kernels", package / "_kernels")
    for place in places:
        if (place / COMMIT_FILE).is_file():
            return place
    looked = " nor ".join(str(place) for place in places)
    raise BuildError(f"the kernel sources are neither in {looked}", "reinstall tfla_tk")


def thunderkittens_commit() -> str:
    """The pinned ThunderKittens commit, 40 hexadecimal digits."""
    return (kernels_root() / COMMIT_FILE).read_text(encoding="ascii").strip()
