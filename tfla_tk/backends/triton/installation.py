"""Which Triton kernels can be used here: packages, versions, devices."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys

import torch

from tfla_tk import env
from tfla_tk.core.installed import find_package
from tfla_tk.core.support import Support

INTERPRETED = env.TRITON_INTERPRET.get() == "1"

INSTALL = "pip install 'tfla_tk[baselines]'"
if sys.version_info < (3, 11):
    INSTALL += ", on Python 3.11 or newer"


def triton_version() -> str | None:
    """The version of Triton, or None where it is not installed. It is imported only where metadata fails."""
    if find_package("triton") is None:
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # pytorch-triton and others bring the module too
        try:
            version: str | None = getattr(importlib.import_module("triton"), "__version__", None)
        except Exception:  # whatever a package of others does on import
            return None
        return version


def missing(package: str, distribution: str) -> Support | None:
    """Why a package cannot be used here; it is not imported."""
    version = triton_version()
    if version is None:
        return Support(False, "triton is not installed", INSTALL)
    if find_package(package) is None:
        return Support(False, f"{distribution} is not installed", INSTALL)
    if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) >= (3, 9):
        return Support(False, f"triton {version} has no block pointers, which {distribution} uses", INSTALL)
    return None


def unusable(device: torch.device, missing: Support | None) -> Support | None:
    """Device and installation."""
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return Support(
            False, f"Triton kernels run on a GPU, the tensors are on {device}", "move them to a CUDA device"
        )
    return missing
