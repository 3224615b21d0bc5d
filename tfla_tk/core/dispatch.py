"""The path of every call of a public function: check it, choose the backend, serve it.

"auto" takes the first backend that serves the call exactly, in the order of BACKENDS; a backend asked for by
name serves the call or raises. These steps read metadata alone: plain eager calls of one signature come out
of them alike. So one plan is made for all such calls (`CallMemo`); they look it up and call what serves them.

A backend has a module for mLSTM and one for the operators in [B, T, H, D], or one for all (`family_module`).
It has, for each kernel of these,

    supports_<kernel>(call, variant) -> Support     whether it serves a call; loads and compiles nothing
    <kernel>(call, variant, *tensors) -> results    serves it; tensors in the order of the family's calls

and may have

    load(kernel, call, variant) -> Support          loads what a supported call needs, before it is computed
    prepare_<kernel>(call, variant, tensors)        what serves plain eager calls like this one, a function of
                                                    their tensors; or None where <kernel> serves them as well
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from tfla_tk.core.checks import counted, fail, shown, shown_name
from tfla_tk.core.eager import comparison_with, is_eager, is_watched, is_wrapped, modes, records
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.memo import Memo, call_memos
from tfla_tk.core.support import SUPPORTED, Call, Choice, Support, together

BACKENDS = ("tk", "triton", "reference")  # in the order that "auto" tries them
_CALLER = 6  # of a public function, as `_warn_of_swapped` counts the frames

# of a valid call's arguments that are no tensors
_OPTION_TYPES = {type(None), bool, int, float, str, torch.dtype}
_OPTION_TYPES |= {np.bool_, np.int32, np.int64, np.float32, np.float64}

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


# the public functions by their names; a reload of this module alone keeps what other modules have registered
OPERATORS: dict[str, Callable[..., Any]] = globals().get("OPERATORS", {})


def operator(function: Function) -> Function:
    """Register a public function for `which`. It hands its `backend` on to `CallPath`."""
    OPERATORS[function.__name__] = function
    return function


DESCRIBE = object()  # in the place of `backend`: the call is to be described, not served


class Described(Exception):
    """Ends such a call. args: the kernel's name and the call's description."""


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

    name: str  # of the kernel, as `family_module` has it
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
        if backend is DESCRIBE:
            raise Described(self.name, call)
        if eager and self.layout and call.heads > call.seq > 0 and op not in self._warned:
            self._warn_of_swapped(op, call, arguments)
        name, variant = choose(op, self.name, call, backend)
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


class CallMemo(Generic[Result]):
    """Results by the signature of plain eager calls; neither of the two holds a tensor. That a call is like
    the latest one takes less to see. strided: strides are part of the signature."""

    def __init__(self, strided: bool = False) -> None:
        self._strided = strided
        call_memos.add(self)
        self._known: Memo[tuple[_Likeness, Result]] = Memo()
        self._latest: tuple[_Likeness, Result] | None = None

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        self._known.clear()
        self._latest = None

    def of(self, tensors: tuple[Any, ...], options: tuple[Any, ...], make: Callable[..., Result]) -> Result:
        """What `make(tensors, options, eager=...)` returns, made once for plain eager calls of one
        signature. eager says that the call is such a one: nothing traces or intercepts it."""
        # while torch.compile traces, `_latest` is not looked at: it would compile anew when that changes
        latest = None if is_watched() else self._latest
        if latest is not None and latest[0].is_of(tensors, options):
            return latest[1]
        try:
            key = signature(tensors, options, self._strided)
        except RuntimeError:
            # a nested tensor has no shape; `make` refuses it, and to ask every tensor here would take time
            key = None
        if key is None:
            return make(tensors, options, eager=False)
        found = self._known.get(key)
        if found is None or found is latest:
            # the latest is of this signature, too, but was not seen to be: as in inference mode
            result = make(tensors, options, eager=True) if found is None else found[1]
            found = _Likeness(tensors, options, self._strided), result
            self._known.keep(key, found)
        self._latest = found
        return found[1]


class _Likeness:
    """Whether eager calls are plain and of one signature. tensors, options: of such a call. strided: strides
    are part of the signature."""

    def __init__(self, tensors: tuple[Any, ...], options: tuple[Any, ...], strided: bool) -> None:
        present = [x for x in tensors if x is not None]
        self._types = tuple(map(type, tensors + options))
        self._options = options
        self._modes = modes(tensors)
        self._grad_mode = torch.is_grad_enabled()
        self._leaves = [x.is_leaf for x in present] if records(tensors) else None
        self._are_alike = comparison_with(present, strided=strided)

    def is_of(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Whether a call that nothing watches is such a call; False may be wrong."""
        if (
            self._are_alike is None
            or tuple(map(type, tensors + options)) != self._types
            or options != self._options
            or modes(tensors) != self._modes
            or torch.is_grad_enabled() != self._grad_mode
        ):
            return False
        present = [x for x in tensors if x is not None]
        for x in present:
            if x.is_nested or x.layout is not torch.strided:
                return False
        if self._leaves is not None and [x.is_leaf for x in present] != self._leaves:
            return False
        return self._are_alike(*present)


def signature(tensors: tuple[Any, ...], options: tuple[Any, ...], strided: bool = False) -> Hashable | None:
    """All that validation, choice and dispatch of a call depend on, but for the machine. None for anything
    but a plain eager call: while something traces, transforms or intercepts torch operations, for tensor
    subclasses and what torch.func has wrapped, and for arguments that are not of the types that a valid
    call has. tensors: q first; tensors or None. options: the other arguments; 1, 1.0 and True differ.
    strided: whether strides count."""
    types = tuple(map(type, options))
    if not (is_eager(tensors) and _OPTION_TYPES.issuperset(types)):
        return None
    parts: list[Hashable] = [options, types, modes(tensors)]
    grad_mode = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if x.layout is not torch.strided or is_wrapped(x):
            return None
        if strided:
            parts.append((x.shape, x.dtype, x.device, x.is_neg(), x.stride()))
        else:
            parts.append((x.shape, x.dtype, x.device, x.is_neg()))
        if grad_mode and x.requires_grad:
            parts.append(x.is_leaf)
    return tuple(parts)


def family_module(backend: str, kernel: str) -> ModuleType:
    """The module of one of BACKENDS that serves a kernel: "mlstm", "mlstm_step", "mlstm_sequence",
    "simple_gla", "delta_rule", "gla" or "kda". It is imported on the first call that considers it."""
    of_mlstm = kernel.startswith("mlstm")
    if backend == "tk":
        from tfla_tk.backends.tk import linear, mlstm

        return mlstm if of_mlstm else linear
    if backend == "triton":
        from tfla_tk.backends.triton import fla, mlstm_kernels

        return mlstm_kernels if of_mlstm else fla
    from tfla_tk.backends.reference import forms

    return forms


def split_backend(backend: str) -> tuple[str, str | None]:
    """Split "name" or "name:variant"; ValueError for a name that is no backend."""
    if not isinstance(backend, str):
        fail("backend", "a str", shown(backend), TypeError)
    name, colon, variant = backend.partition(":")
    if name not in BACKENDS and backend != "auto":
        known = ("auto", *BACKENDS)
        fail("backend", f"one of {', '.join(known)}, or name:variant", shown_name(backend, known))
    return name, variant if colon else None


def support(name: str, kernel: str, call: Any, variant: str | None = None) -> Support:
    """The verdict of one backend on one call."""
    supports = getattr(family_module(name, kernel), f"supports_{kernel}")
    verdict: Support = supports(call, variant)
    refusals = [] if verdict.ok else [verdict]
    if name != "reference" and call.forward_mode:
        reason = "its kernels have no forward-mode derivative"
        refusals.append(Support(False, reason, "use backend='reference'"))
    if name == "triton" and call.batch_invariant:
        reason = "its results may depend on the batch, and tfla_tk.batch_invariant is on"
        refusals.append(Support(False, reason, "use backend='tk', or turn the option off"))
    return together(*refusals) or verdict


def loaded(name: str, kernel: str, call: Any, variant: str | None = None) -> Support:
    """The verdict of one backend after it has loaded what a call that it supports needs."""
    load = getattr(family_module(name, kernel), "load", None)
    return SUPPORTED if load is None else load(kernel, call, variant)


def choose(op: str, kernel: str, call: Any, backend: str, *, load: bool = True) -> tuple[str, str | None]:
    """The backend and variant that serve the call. load: have the backend load what the call needs, as a
    call does before it is computed; "auto" goes on to the next one where that fails. UnsupportedError: a
    backend asked for by name cannot serve it, or under "auto" none can. CaptureError: a kernel would have
    to be compiled while a CUDA graph is being captured."""
    name, variant = split_backend(backend)
    if name == "auto":
        for candidate in BACKENDS:
            verdict = support(candidate, kernel, call)
            if verdict.ok and verdict.auto and (not load or loaded(candidate, kernel, call).ok):
                return candidate, None
        raise UnsupportedError(op, "no backend serves this call", f"see tfla_tk.which({op!r}, ...)")
    verdict = support(name, kernel, call, variant)
    if verdict.ok and load:
        verdict = loaded(name, kernel, call, variant)
    if not verdict.ok:
        what = f"{op} on backend {backend!r}"
        raise UnsupportedError(what, verdict.reason, verdict.remedy, failed=verdict.failed)
    return name, variant


def describe(op: str, *args: Any, **kwargs: Any) -> tuple[str, str, Any]:
    """The backend that a call of a public function asks for, the kernel's name, and the call's
    description. TypeError, ValueError: whatever the call itself would raise about its arguments."""
    try:
        bound = inspect.signature(OPERATORS[op]).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    backend = bound.arguments.get("backend", "auto")
    bound.arguments["backend"] = DESCRIBE
    try:
        OPERATORS[op](*bound.args, **bound.kwargs)
    except Described as described:
        return backend, *described.args
    raise AssertionError(f"{op} has served a call that was to be described")


def which(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Say which backend a call would use, and why not the others. Nothing is computed, loaded or compiled.

    The machine is looked at once in a process. What only shows when a kernel is compiled, for instance a full
    disk, is known after the first call that needs the kernel.

    Args:
        op: a public function of this package or its name, for example "mlstm_chunkwise".
        args, kwargs: the arguments of that call; fake tensors of a device serve as well. The kernels refuse
            tensors on the meta device, as they do calls with them.

    Returns:
        The choice with a verdict per backend; `print` it to read it.

    Raises:
        UnsupportedError, ValueError, TypeError: whatever the call itself would raise before computing.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPERATORS:
        fail("op", f"one of {', '.join(sorted(OPERATORS))}", shown_name(name, OPERATORS))
    backend, kernel, call = describe(name, *args, **kwargs)
    chosen, variant = choose(name, kernel, call, backend, load=False)
    reasons = {candidate: support(candidate, kernel, call) for candidate in BACKENDS}
    label = chosen if variant is None else f"{chosen}:{variant}"
    reasons.setdefault(label, support(chosen, kernel, call, variant))
    return Choice(label, reasons)
