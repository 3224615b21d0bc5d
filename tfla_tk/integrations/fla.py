"""These kernels in the place of fla's functions: in its layers, and in whatever else calls them.

    accelerate()     fla's chunk_simple_gla, chunk_retention, chunk_lightning_attn, chunk_gla,
                     chunk_delta_rule, chunk_gated_delta_rule and chunk_kda become these kernels, and so do
                     their fused_recurrent forms, by which models generate
    restore()        the way back
    last_path()      what has served the latest call, and why not the kernels
    paths()          how many calls each backend has served, by function

`accelerate` puts a function of the same arguments in the place of fla's own, in every module that is loaded:
wherever an attribute is fla's function. What is imported from fla later finds it, too. References that are no
attributes of modules (in a list, a closure, a class) keep fla's function. Those of the gated delta rule and
of KDA, such as Hugging Face's, are reached all the same. For chunk_gated_delta_rule and chunk_kda
`accelerate` registers a backend with fla, unless fla's dispatch is off (FLA_DISABLE_BACKEND_DISPATCH=1).
fused_recurrent_gated_delta_rule and fused_recurrent_kda look up in their modules at every call what computes
them, an autograd function and a function, which `accelerate` replaces.

A call that the kernels cannot serve goes to fla's own function, and so does one whose arguments do not pass
this package's checks: fla says what is wrong with them, or takes them. On a CPU, where fla's functions cannot
run, the reference serves every call. Importing this module does not import fla.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk.backends.triton import fla_own, installation
from tfla_tk.backends.triton.fla import FLA_OPS
from tfla_tk.core import dispatch
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.memo import Memo
from tfla_tk.delta_rule import check_gated_delta_rule
from tfla_tk.kda import check_chunk_kda

__all__ = ["FUNCTIONS", "Path", "accelerate", "is_accelerated", "last_path", "paths", "restore"]

# the names of fla's functions that have one of this package's for the same arguments: fla's module of each
FUNCTIONS = dict(FLA_OPS)
# those for which fla takes backends of others: what checks a call
_DISPATCHED = {"chunk_gated_delta_rule": check_gated_delta_rule, "chunk_kda": check_chunk_kda}
_OPERATIONS = {"chunk_gated_delta_rule": "gated_delta_rule"}  # their names there; others are known themselves
# those that are replaced further in, too: the name in fla's module of what they look up there
_APPLIED = {
    "fused_recurrent_gated_delta_rule": "FusedRecurrentFunction",
    "fused_recurrent_kda": "fused_recurrent_kda_fwd",
}

# the arguments that each of fla's functions reads, in their order and whether they are flags, for which
# callers pass None and numbers, too; and how many of them may be given by their place
_READ: dict[str, dict[str, bool]] = {}
_PLACES: dict[str, int] = {}
for _name in FUNCTIONS:
    _parameters = inspect.signature(getattr(tfla_tk, _name)).parameters.values()
    _more = {"backend", "state_indices", "inplace"}  # than fla's
    _more |= {"g_gamma"} if _name == "chunk_lightning_attn" else set()
    _READ[_name] = {each.name: each.annotation is bool for each in _parameters if each.name not in _more}
    _PLACES[_name] = sum(each.kind is not each.KEYWORD_ONLY for each in _parameters)
# refuse keywords that they do not read; the others ignore them
_WITHOUT_OTHERS = ("chunk_gla", "fused_recurrent_delta_rule")
# ignore head_first, which was a flag of the others
_WITH_HEAD_FIRST = ("chunk_kda", *(name for name in FUNCTIONS if name.startswith("fused_recurrent_")))
# fla's former name of state_v_first, and the functions that still take it
_OLD_V_FIRST = "transpose_state_layout"
_TAKE_OLD_NAME = {*_WITH_HEAD_FIRST, "chunk_gated_delta_rule"} - {"fused_recurrent_delta_rule"}

_log = logging.getLogger("tfla_tk")
_lock = threading.RLock()
_told: set[tuple[str, str]] = set()  # what has been logged
_LIMIT = 64  # of these
_last: "Path | None" = None
_counts: Counter[tuple[str, str]] = Counter()
# the names of the functions that are these kernels now, what is in the place of each of fla's functions by
# that one, and the classes that are registered with fla; a reload of this module keeps them
_accelerated: set[str] = globals().get("_accelerated", set())
_in_place: dict[str, dict[Callable[..., Any], Callable[..., Any]]]
_in_place = globals().get("_in_place", {name: {} for name in FUNCTIONS})
_backends: dict[str, Any] = globals().get("_backends", {})
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
        known = _known(names)
        replaced = _rebind(pair for name in known for pair in _pairs(name))
        for name in known:
            if name in _DISPATCHED:
                _register(name)
            _accelerated.add(name)
        return replaced


def restore(names: Iterable[str] | None = None) -> list[str]:
    """Undo `accelerate`, names and errors as there: every attribute of a module is fla's own function again.

    Returns:
        The attributes that were put back, as "module.attribute".
    """
    global _last
    with _lock:
        known = _known(names)
        for name in known:
            _accelerated.discard(name)
            _refused[name].clear()
            if _last is not None and _last.function == name:
                _last = None
            for key in [key for key in _counts if key[0] == name]:
                del _counts[key]
        imported = [name for name in known if FUNCTIONS[name] in sys.modules]
        return _rebind((ours, own) for name in imported for own, ours in _pairs(name))


def is_accelerated(name: str | None = None) -> bool:
    """Whether these kernels are in the place of one of fla's functions; None: of all of them.

    Raises:
        ValueError: an unknown name.
    """
    with _lock:
        return all(
            FUNCTIONS[each] in sys.modules
            and all(hasattr(function, fla_own.ORIGINAL) for function in _current(each))
            for each in _known(None if name is None else [name])
        )


def last_path() -> Path | None:
    """What has served the latest call that came here and returned, of any thread.

    None before the first one, and after `restore` has put back the function that it called. Calls that raised
    and those that torch.compile traces do not count; but one that fla's own dispatch asks about, and that
    goes back to it, counts as soon as it does.
    """
    return _last


def paths() -> dict[str, dict[str, int]]:
    """How many calls each backend has served, by the name of fla's function, as `last_path` counts them.

    `restore` forgets those of the functions that it puts back.
    """
    found: dict[str, dict[str, int]] = {}
    for (function, backend), count in sorted(_counts.items()):
        found.setdefault(function, {})[backend] = count
    return found


def _known(names: Iterable[str] | None) -> list[str]:
    if isinstance(names, str):
        names = [names]
    found = list(FUNCTIONS if names is None else names)
    for name in found:
        if name not in FUNCTIONS:
            fail("names", f"some of {', '.join(FUNCTIONS)}", shown_name(name, FUNCTIONS))
    return found


def _pairs(name: str) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """fla's function of a name and what goes in its place; each that there was, where fla's modules were
    loaded anew."""
    for function in _current(name):
        own = fla_own.original(function)
        if own not in _in_place[name]:
            _in_place[name][own] = _in_place_of(name, own) if function is own else function
    return list(_in_place[name].items())


def _current(name: str) -> list[Callable[..., Any]]:
    """What fla's module has under a name, and what the module has that defines it, which may be newer."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(FUNCTIONS[name]), name)
    except Exception as error:  # whatever a package of others does on import
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing == "triton":
            told = "fla needs triton, which is not installed: pip install triton"
        elif missing == "fla":
            told = "fla is not installed: pip install flash-linear-attention"
        else:
            told = f"fla cannot be imported: {type(error).__name__}: {error}"
        raise ImportError(told) from error
    defining = sys.modules.get(fla_own.original(function).__module__)
    found = [function, getattr(defining, name, function)]
    if name in _APPLIED and hasattr(defining, _APPLIED[name]):
        found.append(getattr(defining, _APPLIED[name]))
    return found


def _rebind(pairs: Iterable[tuple[Any, Any]]) -> list[str]:
    """Have every attribute of a module that is the first function of a pair be the second one; which they
    were."""
    found: list[str] = []
    # the functions are held, so that no other one gets their id
    wanted_of = {id(present): (present, wanted) for present, wanted in pairs if present is not wanted}
    if not wanted_of:
        return found
    # a module may be imported meanwhile, and sys.modules may hold what is no module
    for module_name, module in list(sys.modules.items()):
        attributes = getattr(module, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        for attribute, value in list(attributes.items()):
            if pair := wanted_of.get(id(value)):
                setattr(module, attribute, pair[1])
                found.append(f"{module_name}.{attribute}")
    return found


def _in_place_of(name: str, own: Callable[..., Any]) -> Any:
    """The function for the place of fla's own, or of what it looks up."""
    if isinstance(own, type):
        return _Applied(name, own)
    is_inner = getattr(own, "__name__", "") == _APPLIED.get(name)

    # not the attributes: they keep torch.compile out of fla's function
    @functools.wraps(own, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_inner and not _is_plain_step(args, kwargs):
            return own(*args, **kwargs)
        return _serve(name, own, args, kwargs)

    setattr(function, fla_own.ORIGINAL, own)
    return function


def _is_plain_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of fused_recurrent_kda_fwd is such as fused_recurrent_kda makes."""
    others = ("ssm_state_indices", "num_accepted_tokens", "out")
    in_place = kwargs.get("inplace_final_state", True)
    return not (args or in_place or any(kwargs.get(other) is not None for other in others))


class _Applied:
    """In the place of an autograd function of fla's: serves what it is applied to."""

    def __init__(self, name: str, own: Any) -> None:
        setattr(self, fla_own.ORIGINAL, own)
        self._name, self._own = name, own
        self._names = tuple(inspect.signature(own.forward).parameters)[1:]  # without ctx

    def apply(self, *args: Any) -> Any:
        options = dict(zip(self._names, args, strict=False))
        options["use_gate_in_kernel"] = options.get("A_log") is not None
        return _serve(self._name, lambda **_: self._own.apply(*args), (), options)


def _serve(name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, by the kernels where they can serve it."""
    compiling = torch.compiler.is_compiling()
    # whoever has got hold of this function keeps it after `restore`
    if name not in _accelerated or (not compiling and fla_own.is_on_its_own()):
        return own(*args, **kwargs)
    options = _as_read(name, args, kwargs)
    if options is None:
        return own(*args, **kwargs)
    if not compiling:
        _tell_old_name(kwargs)
    ours = getattr(tfla_tk, name)
    if _is_on_cpu(options):
        return _by(name, "reference", _ON_A_CPU, functools.partial(ours, **options, backend="reference"))
    own_call = functools.partial(own, *args, **kwargs)
    refused = _refused[name]
    if not compiling and len(refused):
        reason = refused.get(_signature(options))
        if reason is not None:
            return _by(name, "fla", reason, own_call)
    try:
        result = ours(**options, backend="tk")
    except UnsupportedError as error:
        reason = error.reason
        # what could not be built is tried again
        key = None if compiling or error.failed else _signature(options)
        if key is not None:
            refused.keep(key, reason)
    except (TypeError, ValueError) as error:
        if _are_sound(name, options):  # an error of ours
            raise
        reason = str(error)
    else:
        _record(name, "tk", "")
        return result
    if compiling:
        return own(*args, **kwargs)
    return _by(name, "fla", reason, own_call)


_ON_A_CPU = "the tensors are on a CPU"


def _as_read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What one of fla's functions reads of its arguments, by keyword; None for those that it refuses itself.

    Flags are bools, and offsets on the CPU are left out where there are none on the device.
    """
    read = _READ[name]
    options = dict(zip(read, args, strict=False))
    options.update(kwargs)
    if len(args) > _PLACES[name] or len(options) < len(args) + len(kwargs):
        return None
    others = [key for key in options if key not in read]
    if others:
        if name in _WITHOUT_OTHERS or ("head_first" in others and name not in _WITH_HEAD_FIRST):
            return None
        if name in _TAKE_OLD_NAME and _OLD_V_FIRST in others:
            if options.get("state_v_first"):
                return None
            options["state_v_first"] = options[_OLD_V_FIRST]
        for key in others:
            del options[key]
    if options.get("cu_seqlens") is None:
        options.pop("cu_seqlens_cpu", None)
    return {key: bool(value) if read[key] else value for key, value in options.items()}


def _are_sound(name: str, options: dict[str, Any]) -> bool:
    """Whether arguments pass the checks, which come before all else."""
    try:
        dispatch.describe(name, **options)
    except (TypeError, ValueError):
        return False
    return True


def _tell_old_name(kwargs: dict[str, Any]) -> None:
    if _OLD_V_FIRST in kwargs:
        message = f"{_OLD_V_FIRST} is deprecated: fla calls it state_v_first"
        warnings.warn(message, DeprecationWarning, stacklevel=4)


# fla's own dispatch


def _register(name: str) -> None:
    """Have fla offer its calls of one of _DISPATCHED to these kernels first."""
    backends = importlib.import_module("fla.backends")
    if name in _backends and issubclass(_backends[name], backends.BaseBackend):
        return

    class TflaTkBackend(backends.BaseBackend):  # type: ignore[name-defined]
        """fla asks it before every call and hands the call over where it accepts."""

        backend_type = "tfla_tk"
        package_name = "tfla_tk"
        env_var = "FLA_TFLA_TK"
        priority = 1  # FlashQLA's and FlashKDA's are 3

        @classmethod
        def is_available(cls) -> bool:
            return name in _accelerated

        def verify(self, function: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _verify(name, args, kwargs) if function == name else (False, "another function")

        def get_implementation(self, function: str) -> Callable[..., Any]:
            return functools.partial(_serve_dispatched, name)

    own = fla_own.original(getattr(importlib.import_module(FUNCTIONS[name]), name))
    backends.register(_OPERATIONS.get(name, own))(TflaTkBackend)
    _backends[name] = TflaTkBackend


def _serve_dispatched(name: str, *args: Any, **kwargs: Any) -> Any:
    """A call that fla hands over."""
    options = _as_read(name, args, kwargs)
    assert options is not None
    _tell_old_name(kwargs)
    backend, reason = ("reference", _ON_A_CPU) if _is_on_cpu(options) else ("tk", "")
    return _by(name, backend, reason, functools.partial(getattr(tfla_tk, name), **options, backend=backend))


def _verify(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, str | None]:
    """Whether these kernels serve a call, and why not; fla's own functions are its own."""
    if fla_own.is_on_its_own():
        return False, "fla's own function was asked for"
    options = _as_read(name, args, kwargs)
    if options is None:
        return False, "fla's own function refuses its arguments"
    if _is_on_cpu(options):
        return True, None
    try:
        _DISPATCHED[name](**options, backend="tk")
    except UnsupportedError as error:
        reason = error.reason
    except Exception as error:
        # fla takes all that is raised here for a refusal: the call itself is to raise it
        if not isinstance(error, (TypeError, ValueError)) or _are_sound(name, options):
            return True, None
        reason = str(error)
    else:
        return True, None
    # fla's dispatch goes on with the call; nothing comes back here
    _tell(name, "fla", reason)
    _record(name, "fla", reason)
    return False, reason


def _signature(options: dict[str, Any]) -> Hashable | None:
    """All that a refusal depends on; None for anything but a plain eager call."""
    given = (options.get("q"), *options.values())
    tensors = tuple(x if isinstance(x, Tensor) else None for x in given)
    try:
        return dispatch.signature(tensors, (*options, *(None if isinstance(x, Tensor) else x for x in given)))
    except RuntimeError:  # a nested tensor has no shape
        return None


def _is_on_cpu(options: dict[str, Any]) -> bool:
    """Whether fla's own function could not run: on meta tensors, too."""
    q = options.get("q")
    return isinstance(q, Tensor) and q.device.type in ("cpu", "meta") and not installation.INTERPRETED


def _by(name: str, backend: str, reason: str, call: Callable[[], Any]) -> Any:
    """What a call by a backend returns, with the log before it and the record behind it."""
    _tell(name, backend, reason)
    with fla_own.on_its_own() if backend == "fla" else contextlib.nullcontext():
        result = call()
    _record(name, backend, reason)
    return result


def _record(name: str, backend: str, reason: str) -> None:
    global _last
    if not torch.compiler.is_compiling():
        _last = Path(name, backend, reason)
        _counts[name, backend] += 1


def _tell(name: str, backend: str, reason: str) -> None:
    """Log, once, why the kernels do not serve a call: before it runs, since it may raise for that reason."""
    if torch.compiler.is_compiling() or not reason:
        return
    if (name, reason) not in _told and len(_told) < _LIMIT:
        _told.add((name, reason))
        _log.warning("%s is served by %s: %s", name, backend, reason)
