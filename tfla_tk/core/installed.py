"""Which packages are installed, without importing them."""

import importlib.util
from importlib.machinery import ModuleSpec


def find_package(name: str) -> ModuleSpec | None:
    """The spec of an installed top-level package, or None; a module without a spec that a program has put
    into sys.modules, to stand for the package, counts as not installed: nothing can be imported from it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
