"""Which backend serves a call, and why: the support table behind `backend=` and `which`.

Backends are asked through `backends.registry`. "auto" takes the first one that serves the call exactly, in
the order of BACKENDS; a backend asked for by name serves the call or raises.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tfla_tk.backends.registry import BACKENDS, family_module
from tfla_tk.core.checks import fail, shown, shown_name
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.support import SUPPORTED, Choice, Support, together

Function = TypeVar("Function", bound=Callable[..., Any])


# the public functions by their names; a reload of this module alone keeps what other modules have registered
OPERATORS: dict[str, Callable[..., Any]] = globals().get("OPERATORS", {})


def operator(function: Function) -> Function:
    """Register a public function for `which`. It hands its `backend` on to `plan.CallPath`."""
    OPERATORS[function.__name__] = function
    return function


DESCRIBE = object()  # in the place of `backend`: the call is to be described, not served


class Described(Exception):
    """Ends such a call. args: the kernel's name and the call's description."""


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
