"""What has to be done before anything else of the package is imported."""

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import torch

OLDEST_TORCH = 2, 11

_PACKAGES = "tfla_tk.reference", "tfla_tk.bench"
_CHECKOUT = str(Path(__file__).parents[1])


class Finder:
    """Finds two packages in the package's folder, as installed, or beside it, as in a checkout."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of the two; None for all other modules, and where it is in neither place."""
        return PathFinder.find_spec(name, [*(path or ()), _CHECKOUT]) if name in _PACKAGES else None


# before the finder of an editable install, which may be of another checkout
sys.meta_path.insert(0, Finder)

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    warnings.warn(
        f"tfla_tk needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer, found {torch.__version__}: "
        "torch.compile and torch.func may fail",
        stacklevel=3,
    )
