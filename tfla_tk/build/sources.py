"""Where the kernel sources lie, and the ThunderKittens commit they are written for."""

import os
from pathlib import Path

from tfla_tk.build.errors import BuildError

COMMIT_FILE = "THUNDERKITTENS_COMMIT"


def kernels_root() -> Path:
    """The kernel sources: ``kernels/`` of a checkout, ``tfla_tk/_kernels`` of an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    places = (package.parent / "kernels", package / "_kernels")
    for place in places:
        if os.path.isfile(place / COMMIT_FILE):
            return place
    looked = " nor ".join(str(place) for place in places)
    raise BuildError(f"the kernel sources are neither in {looked}", "reinstall tfla_tk")


def thunderkittens_commit() -> str:
    """The pinned ThunderKittens commit, 40 hexadecimal digits."""
    return read(kernels_root() / COMMIT_FILE).decode("ascii").strip()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BuildError(f"the kernel source {path} cannot be read: {error}", "reinstall tfla_tk") from error
