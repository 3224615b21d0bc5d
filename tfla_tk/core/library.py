"""The torch library of this package's ops.

torch keeps an op for the life of the process and takes its definition and each implementation once. Modules
are loaded again all the same: by importlib.reload, by autoreload, by an import after sys.modules was cleared.
So the library outlives the modules, and what it registers with torch looks up the newest implementation at
each call.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "tfla_tk"


class Library(torch.library.Library):
    """A torch.library.Library in which whatever is there already may be defined and implemented again."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE, "DEF")
        self._schemas: dict[str, str] = {}
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}

    def define(self, schema: str, *args: Any, **options: Any) -> Any:
        """Define an op, once; RuntimeError where it is there with another schema, since torch cannot
        replace it."""
        name = schema.partition("(")[0]
        if name not in self._schemas:
            defined = super().define(schema, *args, **options)
            self._schemas[name] = schema
            return defined
        if self._schemas[name] != schema:
            raise RuntimeError(
                f"{NAMESPACE}::{name}: expected the schema that this process has, {self._schemas[name]}, "
                f"got {schema}; restart Python"
            )
        return name

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Have an op call `fn` for a dispatch key from now on."""
        newest = self._newest(str(op_name), dispatch_key, fn)
        if newest is not None:
            super().impl(op_name, newest, dispatch_key, **options)

    def register_fake(self, op_name: str, fn: Callable[..., Any]) -> None:
        newest = self._newest(op_name, "fake", fn)
        if newest is not None:
            torch.library.register_fake(f"{NAMESPACE}::{op_name}", newest, lib=self)

    def register_vmap(self, op_name: str, fn: Callable[..., Any]) -> None:
        newest = self._newest(op_name, "vmap", fn)
        if newest is not None:
            torch.library.register_vmap(f"{NAMESPACE}::{op_name}", newest, lib=self)

    def _newest(self, name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """What calls the newest function for a key, for torch to keep; None where torch has it already."""
        functions, place = self._functions, (name, key)
        is_known = place in functions
        functions[place] = function
        if is_known:
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            return functions[place](*args, **kwargs)

        return call


def get() -> Library:
    """The library, made on the first call of the process."""
    # torch's own namespace: it stays when the modules of this package are dropped
    kept = vars(getattr(torch.ops, NAMESPACE))
    if "_library" not in kept:
        kept["_library"] = Library()
    return kept["_library"]
