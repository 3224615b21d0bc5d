"""fla's own functions, where `tfla_tk.integrations.fla` has put others in their place.

What it puts there has the attribute ORIGINAL. fla's functions call one another, so within `on_its_own` those
in their place hand every call on to the originals.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

ORIGINAL = "tfla_tk_original"
_own = threading.local()


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, ORIGINAL, function)


@functools.cache
def undispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """fla's function without fla's choice among kernels of other packages, which are not all exact."""
    return torch.compiler.disable(inspect.unwrap(function))


@contextmanager
def on_its_own() -> Iterator[None]:
    """Where fla's functions call fla's functions alone, in this thread."""
    before = is_on_its_own()
    _own.value = True
    try:
        yield
    finally:
        _own.value = before


def is_on_its_own() -> bool:
    return getattr(_own, "value", False)
