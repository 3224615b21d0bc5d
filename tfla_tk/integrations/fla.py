"""These kernels in the place of fla's functions: in its layers, and in whatever else calls them.

    accelerate()     fla's chunk_simple_gla, chunk_retention, chunk_lightning_attn, chunk_gla,
                     chunk_delta_rule and chunk_gated_delta_rule become these kernels
    restore()        the way back
    last_path()      what has served the latest call, and why not the kernels

`accelerate` puts a function of the same arguments in the place of fla's own, in every module that is loaded:
wherever an attribute is fla's function. What is imported from fla later finds it, too. References that are no
attributes of modules (in a list, a closure, a class) keep fla's function. Those of chunk_gated_delta_rule,
such as Hugging Face's, are reached all the same: `accelerate` registers a backend with fla for it, unless
fla's dispatch is off (FLA_DISABLE_BACKEND_DISPATCH=1).

A call that the kernels cannot serve goes to fla's own function. On a CPU, where that cannot run, the
reference serves every call. Importing this module does not import fla.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk.backends.triton import fla_own, installation
from tfla_tk.backends.triton.fla import FLA_OPS
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.memo import Memo, signature
from tfla_tk.delta_rule import check_gated_delta_rule

__all__ = ["FUNCTIONS", "Path", "accelerate", "is_accelerated", "last_path", "restore"]

# the names of fla's functions that have one of this package's for the same arguments: fla's module of each
FUNCTIONS = {
    name: FLA_OPS[name]
    for name in (
        "chunk_simple_gla",
        "chunk_retention",
        "chunk_lightning_attn",
        "chunk_gla",
        "chunk_delta_rule",
        "chunk_gated_delta_rule",
    )
}
_DISPATCHED = "chunk_gated_delta_rule"  # the one for which fla takes backends of others
_OPERATION = "gated_delta_rule"  # its name there

# options that callers of fla pass as None, or as numbers, for False and True
_FLAGS = (
    "output_final_state",
    "state_v_first",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
)
# and where they are among the arguments of each function
_FLAG_PLACES = {
    name: [
        place
        for place, each in enumerate(inspect.signature(getattr(tfla_tk, name)).parameters)
        if each in _FLAGS
    ]
    for name in FUNCTIONS
}

_log = logging.getLogger("tfla_tk")
_lock = threading.RLock()
_told: set[tuple[str, str]] = set()  # what has been logged
_LIMIT = 64  # of these
_last: Path | None = None
# the names of the functions that are these kernels now, and the class that is registered with fla; a reload
# of this module keeps both
_accelerated: set[str] = globals().get("_accelerated", set())
_backend: Any = globals().get("_backend")
# why the kernels have refused plain eager calls, by all that a refusal depends on
_refused: dict[str, Memo[str]] = {name: Memo() for name in FUNCTIONS}


@dataclass(frozen=True)
class Path:
    """What has served a call.

    Attributes:
        function: the name of fla's function.
        backend: "tk", "reference", or "fla" for fla's own function.
        reason: why not the kernels; empty with "tk".
    """

    function: str
    backend: str
    reason: str = ""


def accelerate(names: Iterable[str] | None = None) -> list[str]:
    """Put these kernels in the place of fla's functions, in all modules. Calling it again does no harm.

    Call it again where a module has got hold of fla's own function since then, for instance through a reload.

    Args:
        names: which of FUNCTIONS; None is all.

    Returns:
        The attributes that were replaced now, as "module.attribute".

    Raises:
        ImportError: fla is not installed or fails to import; the message says how to install it.
        ValueError: an unknown name.
    """
    with _lock:
        replaced = []
        for name in _known(names):
            current = _current(name)
            own = fla_own.original(current)
            ours = current if current is not own else _in_place_of(name, own)
            replaced += _rebind(own, ours)
            if name == _DISPATCHED:
                _register()
            _accelerated.add(name)
        return replaced


def restore(names: Iterable[str] | None = None) -> list[str]:
    """Undo `accelerate`: every attribute of a module is fla's own function again.

    Args:
        names: which of FUNCTIONS; None is all.

    Returns:
        The attributes that were put back, as "module.attribute".

    Raises:
        ValueError: an unknown name.
    """
    global _last
    with _lock:
        replaced = []
        for name in _known(names):
            _accelerated.discard(name)
            _refused[name].clear()
            if _last is not None and _last.function == name:
                _last = None
            if FUNCTIONS[name] in sys.modules:
                current = _current(name)
                replaced += _rebind(current, fla_own.original(current))
        return replaced


def is_accelerated(name: str | None = None) -> bool:
    """Whether these kernels are in the place of one of fla's functions; None: of all of them.

    Raises:
        ValueError: an unknown name.
    """
    with _lock:
        return all(
            FUNCTIONS[each] in sys.modules and hasattr(_current(each), fla_own.ORIGINAL)
            for each in _known(None if name is None else [name])
        )


def last_path() -> Path | None:
    """What has served the latest call that came here and returned, of any thread.

    None before the first one, and after `restore` has put back the function that it called. Calls that raised
    and those that torch.compile traces do not count; but one that fla's own dispatch asks about, and that
    goes back to it, counts as soon as it does.
    """
    return _last


def _known(names: Iterable[str] | None) -> list[str]:
    if isinstance(names, str):
        names = [names]
    found = list(FUNCTIONS if names is None else names)
    for name in found:
        if name not in FUNCTIONS:
            fail("names", f"some of {', '.join(FUNCTIONS)}", shown_name(name, FUNCTIONS))
    return found


def _current(name: str) -> Callable[..., Any]:
    """What fla's module has under a name."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(FUNCTIONS[name]), name)
    except Exception as error:  # whatever a package of others does on import
        raise ImportError(
            f"fla cannot be imported: {type(error).__name__}: {error}. Install it with {installation.INSTALL}"
        ) from error
    return function


def _rebind(present: Any, wanted: Any) -> list[str]:
    """Have every attribute of a module that is one function be the other one; which they were."""
    found: list[str] = []
    if present is wanted:
        return found
    # a module may be imported meanwhile, and sys.modules may hold what is no module
    for module_name, module in list(sys.modules.items()):
        attributes = getattr(module, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        for attribute, value in list(attributes.items()):
            if value is present:
                setattr(module, attribute, wanted)
                found.append(f"{module_name}.{attribute}")
    return found


def _in_place_of(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """The function for the place of fla's own."""

    # not the attributes: they keep torch.compile out of fla's function
    @functools.wraps(own, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return _serve(name, own, args, kwargs)

    setattr(function, fla_own.ORIGINAL, own)
    return function


def _serve(name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, by the kernels where they can serve it."""
    compiling = torch.compiler.is_compiling()
    # whoever has got hold of this function keeps it after `restore`
    if name not in _accelerated or (not compiling and fla_own.is_on_its_own()):
        return own(*args, **kwargs)
    ours = getattr(tfla_tk, name)
    given, options = _with_flags(name, args, kwargs)
    if _is_on_cpu(args, kwargs):
        call = functools.partial(ours, *given, **options, backend="reference")
        return _by(name, "reference", _ON_A_CPU, call)
    refused = _refused[name]
    if not compiling and len(refused):
        reason = refused.get(_signature(args, kwargs))
        if reason is not None:
            return _by_fla(name, own, args, kwargs, reason)
    try:
        result = ours(*given, **options, backend="tk")
    except _REFUSALS as error:
        reason = _reason(error)
    else:
        _record(name, "tk", "")
        return result
    if compiling:
        return own(*args, **kwargs)
    key = _signature(args, kwargs)
    if key is not None:
        refused.keep(key, reason)
    return _by_fla(name, own, args, kwargs, reason)


def _by_fla(
    name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Any:
    """A call that the kernels refuse, by fla's own function."""
    with fla_own.on_its_own():
        return _by(name, "fla", reason, functools.partial(own, *args, **kwargs))


_ON_A_CPU = "the tensors are on a CPU"
_REFUSALS = (TypeError, ValueError, UnsupportedError)


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, UnsupportedError) else str(error)


def _with_flags(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with flags that are bools."""
    places = _FLAG_PLACES[name]
    given = [bool(x) if place in places else x for place, x in enumerate(args)]
    return given, {**kwargs, **{flag: bool(kwargs[flag]) for flag in _FLAGS if flag in kwargs}}


# fla's own dispatch


def _register() -> None:
    """Have fla offer its calls of _DISPATCHED to these kernels first."""
    global _backend
    backends = importlib.import_module("fla.backends")
    if _backend is not None and issubclass(_backend, backends.BaseBackend):
        return

    class TflaTkBackend(backends.BaseBackend):  # type: ignore[name-defined]
        """fla asks it before every call and hands the call over where it accepts."""

        backend_type = "tfla_tk"
        package_name = "tfla_tk"
        env_var = "FLA_TFLA_TK"
        priority = 1  # FlashQLA's is 3

        @classmethod
        def is_available(cls) -> bool:
            return _DISPATCHED in _accelerated

        def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verify(args, kwargs)

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            given, options = _with_flags(_DISPATCHED, args, kwargs)
            backend, reason = ("reference", _ON_A_CPU) if _is_on_cpu(args, kwargs) else ("tk", "")
            ours = tfla_tk.chunk_gated_delta_rule
            call = functools.partial(ours, *given, **options, backend=backend)
            return _by(_DISPATCHED, backend, reason, call)

    backends.register(_OPERATION)(TflaTkBackend)
    _backend = TflaTkBackend


def _verify(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether these kernels serve a call, and why not; fla's own functions are its own."""
    if fla_own.is_on_its_own():
        return False, "fla's own function was asked for"
    if _is_on_cpu(args, kwargs):
        return True, None
    given, options = _with_flags(_DISPATCHED, args, kwargs)
    try:
        check_gated_delta_rule(*given, **options, backend="tk")
    except _REFUSALS as error:
        reason = _reason(error)
        # fla's dispatch goes on with the call; nothing comes back here
        _tell(_DISPATCHED, "fla", reason)
        _record(_DISPATCHED, "fla", reason)
        return False, reason
    return True, None


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """All that a refusal depends on; None for anything but a plain eager call."""
    given = (args[0] if args else kwargs.get("q"), *args, *kwargs.values())
    tensors = tuple(x if isinstance(x, Tensor) else None for x in given)
    options = (len(args), *kwargs, *(None if isinstance(x, Tensor) else x for x in given))
    try:
        return signature(tensors, options)
    except RuntimeError:  # a nested tensor has no shape
        return None


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether fla's own function could not run: on meta tensors, too."""
    q = args[0] if args else kwargs.get("q")
    return isinstance(q, Tensor) and q.device.type in ("cpu", "meta") and not installation.INTERPRETED


def _by(name: str, backend: str, reason: str, call: Callable[[], Any]) -> Any:
    """What a call by a backend returns, with the log before it and the record behind it."""
    _tell(name, backend, reason)
    result = call()
    _record(name, backend, reason)
    return result


def _record(name: str, backend: str, reason: str) -> None:
    """Keep what has served a call."""
    global _last
    if not torch.compiler.is_compiling():
        _last = Path(name, backend, reason)


def _tell(name: str, backend: str, reason: str) -> None:
    """Log, once, why the kernels do not serve a call: before it runs, since it may raise for that reason."""
    if torch.compiler.is_compiling() or not reason:
        return
    if (name, reason) not in _told and len(_told) < _LIMIT:
        _told.add((name, reason))
        _log.warning("%s is served by %s: %s", name, backend, reason)
