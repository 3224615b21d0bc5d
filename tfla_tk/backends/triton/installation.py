"""Which Triton kernels can be used here: packages, versions, devices."""

import functools
import importlib
import importlib.metadata
import logging
import re
import sys

import torch

from tfla_tk import env
from tfla_tk.core.installed import find_package
from tfla_tk.core.support import SUPPORTED, Support, together

_log = logging.getLogger("tfla_tk")
GRID_LIMIT = 65535  # blocks along the second and the third dimension of a CUDA grid
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
    elsewhere = None
    if device.type != "cuda" and not is_interpreted(device):
        reason = f"Triton kernels run on a GPU, the tensors are on {device}"
        elsewhere = Support(False, reason, "move them to a CUDA device")
    return together(elsewhere, missing)


@functools.cache
def import_fault(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package of others does on import
        _log.warning("the Triton kernels cannot be used: %s does not import", module, exc_info=True)
        return f"{module} does not import: {type(error).__name__}: {error}"
    return ""


import_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]


def load_module(name: str) -> Support:
    """Import what serves a call that is supported: an installed package may still fail to import."""
    fault = import_fault(name)
    return Support(False, fault, INSTALL, failed=True) if fault else SUPPORTED


def is_interpreted(device: torch.device) -> bool:
    """Whether Triton's interpreter would run the kernels: by name only, it is slow."""
    return INTERPRETED and device.type == "cpu"


IN_THE_INTERPRETER = Support(True, "runs in Triton's interpreter", auto=False)


def too_many(what: str, count: int, remedy: str) -> Support:
    """The refusal of a launch with more blocks along y or z than CUDA takes."""
    return Support(False, f"{what} = {count:,}, a CUDA grid takes {GRID_LIMIT:,} there", remedy)
