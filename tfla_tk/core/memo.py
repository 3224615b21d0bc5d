"""What a public function made of its arguments, kept for the next call like it.

Validation and the choice of a backend read metadata alone, so plain eager calls of equal metadata come out
equal. Neither keys nor results hold a tensor.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tfla_tk.core.checks import autocast_dtype
from tfla_tk.core.invariance import is_batch_invariant
from tfla_tk.core.transforms import is_forward_mode_on

LIMIT = 1024

# Names that torch keeps to itself and may drop. Without one of them nothing tells a plain eager call from
# another one, so that no call counts as such and every call goes through the ops, which need none of them.
try:
    from torch._C._autograd import _top_saved_tensors_default_hooks
except ImportError:
    _KNOWS_HOOKS = False
else:
    _KNOWS_HOOKS = True
try:
    from torch._C import (
        _any_requires_grad,
        _dispatch_keys,
        _get_tracing_state,
        _is_any_autocast_enabled,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
    from torch.autograd import _profiler_enabled
except ImportError:
    KNOWS_EAGER_CALLS = False
else:
    KNOWS_EAGER_CALLS = _KNOWS_HOOKS


_TENSOR_TYPES = {Tensor, torch.nn.Parameter, type(None)}
_OPTION_TYPES = {type(None), bool, int, float, str, torch.dtype}
_OPTION_TYPES |= {np.bool_, np.int32, np.int64, np.float32, np.float64}

Result = TypeVar("Result")


class Memo(Generic[Result]):
    """Results by key, at most LIMIT of them: when it is full the oldest goes."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Result] = {}
        self._lock = threading.Lock()
        self.get = self._results.get
        self.clear = self._results.clear

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, key: Hashable, result: Result) -> None:
        with self._lock:
            while len(self._results) >= LIMIT and key not in self._results:
                del self._results[next(iter(self._results))]
            self._results[key] = result

    def of(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """What there is for a key, made and kept where there is nothing yet."""
        found = self.get(key)
        if found is None:
            found = make()
            self.keep(key, found)
        return found


def kept_on_device(
    kept: dict[Any, Tensor], key: Hashable, device: torch.device, make: Callable[[torch.device], Tensor]
) -> Tensor:
    """What `kept` has under a key, which tells the device, else what `make(device)` returns, kept for the
    next time."""
    found = kept.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # the graph's memory is not for keeping
        return make(device)
    with torch.inference_mode(False), torch.no_grad():
        # from the CPU: it is there for every stream when the copy returns
        kept[key] = make(torch.device("cpu")).to(device)
    return kept[key]


_calls: "weakref.WeakSet[CallMemo[Any]]" = weakref.WeakSet()


def forget_calls() -> None:
    """Make anew whatever functions have made of their arguments: something has changed that it depends on."""
    for kept in list(_calls):
        kept.clear()


class CallMemo(Generic[Result]):
    """Results by the signature of plain eager calls. That a call is like the latest one takes less to see.
    strided: strides are part of the signature."""

    def __init__(self, strided: bool = False) -> None:
        self._strided = strided
        _calls.add(self)
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
        latest = None if _is_watched() else self._latest
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
    """Whether eager calls are plain and of one signature. torch's own guards compare metadata in a call
    for all tensors. They are asked about dense tensors alone: of a nested one they end the process.
    tensors, options: of such a call. strided: strides are part of the signature."""

    def __init__(self, tensors: tuple[Any, ...], options: tuple[Any, ...], strided: bool) -> None:
        present = [x for x in tensors if x is not None]
        self._types = tuple(map(type, tensors + options))
        self._options = options
        self._around = _around(tensors)
        self._grad_mode = torch.is_grad_enabled()
        self._leaves = [x.is_leaf for x in present] if records(tensors) else None
        sizes: Any = [list(x.shape) for x in present]
        strides: Any = [list(x.stride()) if strided else [None] * x.dim() for x in present]
        self._are_alike: Callable[..., bool] | None = None
        with suppress(TypeError):  # other arguments in another version of torch
            guards = TensorGuards(*present, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self._are_alike = guards.check

    def is_of(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Whether a call that nothing watches is such a call; False may be wrong."""
        if (
            self._are_alike is None
            or tuple(map(type, tensors + options)) != self._types
            or options != self._options
            or _around(tensors) != self._around
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
    parts: list[Hashable] = [options, types, _around(tensors)]
    grad_mode = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if x.layout is not torch.strided or is_functorch_wrapped_tensor(x):
            return None
        if strided:
            parts.append((x.shape, x.dtype, x.device, x.is_neg(), x.stride()))
        else:
            parts.append((x.shape, x.dtype, x.device, x.is_neg()))
        if grad_mode and x.requires_grad:
            parts.append(x.is_leaf)
    return tuple(parts)


def _around(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a signature has of the state that torch and this package are in."""
    autocast = autocast_dtype(tensors[0], None) if _is_any_autocast_enabled() else None
    return _profiler_enabled(), is_batch_invariant(), autocast


def is_eager(tensors: tuple[Any, ...]) -> bool:
    """Whether nothing traces, transforms or intercepts torch operations on these tensors or Nones."""
    return not _is_watched() and _TENSOR_TYPES.issuperset(map(type, tensors))


def is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether a kernel called with the tensors of an eager call does all that the op would do below
    autograd. Not where a negation is still to be done."""
    # not any(): a generator would take longer than the question
    for x in tensors:  # noqa: SIM110
        if x is not None and x.is_neg():
            return False
    return True


def has_no_values(cu_seqlens: Tensor | None) -> bool:
    """Whether the offsets of packed sequences cannot be read now: a registered op reads them when it runs."""
    return cu_seqlens is not None and (torch.compiler.is_compiling() or is_fake(cu_seqlens))


def is_direct(tensors: tuple[Any, ...]) -> bool:
    """Whether a kernel does all that the op would do: the call `is_plain`, no gradient is recorded, and no
    profiler expects the operator."""
    return not _profiler_enabled() and is_plain(tensors) and not records(tensors)


def named_in_profiles(name: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, which a profiler that is on now shows under a name, as it would show an op."""
    if not _profiler_enabled():
        return function

    def run(*args: Any, **kwargs: Any) -> Result:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return run


def dispatch_like(plain: Tensor, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the dispatcher has no more to do for any of the tensors than for a plain one. Autograd may
    hand over gradients that stand for zeros or for a batch."""
    keys = _dispatch_keys(plain)
    for x in tensors:  # noqa: SIM110
        if x is not None and _dispatch_keys(x) != keys:
            return False
    return True


def records(tensors: tuple[Any, ...]) -> bool:
    """Whether autograd records operations on the tensors; what is no tensor does not count."""
    if not KNOWS_EAGER_CALLS:
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    return torch.is_grad_enabled() and _any_requires_grad(*tensors)


def are_saved_tensors_hooked() -> bool:
    """Whether what autograd saves goes through hooks now, as in activation checkpointing."""
    return _top_saved_tensors_default_hooks(False) is not None


def may_keep() -> bool:
    """Whether a forward should keep for its backward what hooks on saved tensors will see. Not where they
    may move it to a slower memory: those of activation checkpointing make it again instead. Nor where they
    surround a trace, which does not see them: between a call and its recomputation the graph may be
    replaced by one that keeps nothing."""
    if not _KNOWS_HOOKS:
        return False
    around = _top_saved_tensors_default_hooks(True)  # also those that a trace does not see
    if around is None:
        return True
    is_tracing = _top_saved_tensors_default_hooks(False) is None
    return not is_tracing and getattr(around[0], "__module__", None) == "torch.utils.checkpoint"


def _is_watched() -> bool:
    """Whether something traces, transforms or intercepts torch operations, or may do so unseen."""
    return (
        torch.compiler.is_compiling()
        or not KNOWS_EAGER_CALLS
        or get_eval_frame_callback() is not None  # torch.compile may trace what this frame calls
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or is_forward_mode_on()
    )
