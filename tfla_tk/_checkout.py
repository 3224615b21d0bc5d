"""Python started in a checkout finds tfla_tk.reference and tfla_tk.bench, whose folders lie beside tfla_tk/ there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGES = "tfla_tk.reference", "tfla_tk.bench"
_CHECKOUT = str(Path(__file__).parents[1])


class Finder:
    """What import asks first: the folder in this package, as installed, then the one beside it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of the packages; None for all other modules, and where it is in neither place."""
        return PathFinder.find_spec(name, [*(path or ()), _CHECKOUT]) if name in _PACKAGES else None


# first: an editable install of another checkout would find the packages of that one
sys.meta_path.insert(0, Finder)
