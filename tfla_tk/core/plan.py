"""The path of every call: check it, choose the backend, serve it.

Plain eager calls of one signature come out of the first two steps alike, so these are done once for all of
them: such a call makes its signature, looks up the plan, and calls what serves it.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tfla_tk.backends.registry import family_module
from tfla_tk.core import dispatch
from tfla_tk.core.checks import counted
from tfla_tk.core.memo import CallMemo
from tfla_tk.core.support import Call

_CALLER = 6  # of a public function, as `_warn_of_swapped` counts the frames


class Plan(NamedTuple):
    """How a call is served. serve: what the public function computes, from the call's tensors."""

    call: Any
    backend: str
    variant: str | None
    serve: Callable[..., Any]


@dataclass(eq=False)
class CallPath:
    """The calls that a family's functions of one kernel make, and the plans of the plain ones. Options tell
    the functions of a kernel apart, and one of them is `backend`."""

    name: str  # of the kernel, as `registry.family_module` has it
    tensors: tuple[str, ...]  # the names of the arguments in the order in which `serve` gets them
    options: tuple[str, ...]
    # all arguments but `backend` by keyword to the description of a call; raises TypeError and ValueError
    check: Callable[..., Call]
    _: KW_ONLY
    cast: int = 3  # tensors, from the first on, that are cast to the call's dtype where they differ
    strided: bool = True  # strides are part of a signature: `prepare_<name>` depends on them
    layout: str = "[B, T, H, K]"  # of q, where more heads than tokens may be a mistake

    def __post_init__(self) -> None:
        self.arguments = self.tensors + self.options
        self.plans: CallMemo[Plan] = CallMemo(self.strided)
        self._warned: set[str] = set()

    def serve(self, op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
        """What a call of the public function `op` computes, by its backend."""
        return self.plans.of(tensors, options, partial(self._make_plan, op)).serve(*tensors)

    def plan(self, op: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Plan:
        """How `serve` would serve the call; nothing is computed."""
        return self.plans.of(tensors, options, partial(self._make_plan, op))

    def _make_plan(self, op: str, tensors: tuple[Any, ...], options: tuple[Any, ...], *, eager: bool) -> Plan:
        """Check a call and choose its backend; `eager` says that nothing traces or intercepts it."""
        arguments = dict(zip(self.arguments, tensors + options, strict=True))
        backend = arguments.pop("backend")
        call = self.check(**arguments)
        if backend is dispatch.DESCRIBE:
            raise dispatch.Described(self.name, call)
        if eager and self.layout and call.heads > call.seq > 0 and op not in self._warned:
            self._warn_of_swapped(op, call, arguments)
        name, variant = dispatch.choose(op, self.name, call, backend)
        if call.is_empty:
            # nothing to launch: the reference carries the initial state and the graph through
            name, variant = "reference", None
        casts = any(x.dtype != call.dtype for x in tensors[: self.cast])
        module = family_module(name, self.name)
        serve = None
        prepare = getattr(module, f"prepare_{self.name}", None)
        if eager and prepare is not None:
            serve = prepare(call, variant, self._as_dtype(tensors, call.dtype) if casts else tensors)
        if serve is None:
            serve = partial(getattr(module, self.name), call, variant)
        if casts:
            serve = partial(self._serve_cast, serve, call.dtype)
        return Plan(call, name, variant, serve)

    def _warn_of_swapped(self, op: str, call: Call, arguments: dict[str, Any]) -> None:
        """Warn, once, of more heads than tokens; not where a state has the heads, too."""
        # drop-ins of this package choose the layout themselves
        if sys._getframe(_CALLER - 1).f_globals.get("__name__", "").startswith("tfla_tk."):
            return
        if any("initial" in name and x is not None for name, x in arguments.items()):
            return
        text = f"q has {call.heads} heads and {counted(call.seq, 'token')}, read as {self.layout}"
        remedy = "where heads and tokens are swapped, pass x.transpose(1, 2) of all tensors"
        warnings.warn(f"{op}: {text}; {remedy}", stacklevel=_CALLER)
        self._warned.add(op)

    def _serve_cast(self, serve: Callable[..., Any], dtype: torch.dtype, *tensors: Any) -> Any:
        return serve(*self._as_dtype(tensors, dtype))

    def _as_dtype(self, tensors: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return *(x.to(dtype) for x in tensors[: self.cast]), *tensors[self.cast :]
