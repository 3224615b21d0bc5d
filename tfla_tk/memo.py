"""What a public function made of its arguments, kept for the next call like it.

Validation and the choice of a backend read metadata alone, so plain eager calls of equal metadata come out
equal. Neither keys nor results hold a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _any_requires_grad,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import _profiler_enabled

from tfla_tk.validation import autocast_dtype

LIMIT = 1024

_TENSOR_TYPES = {Tensor, torch.nn.Parameter}
_OPTION_TYPES = {type(None), bool, int, float, str, torch.dtype}

Result = TypeVar("Result")


class Memo(Generic[Result]):
    """Results by signature, at most LIMIT of them: when it is full it starts afresh."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Result] = {}
        self.get = self._results.get
        self.clear = self._results.clear

    def __len__(self) -> int:
        return len(self._results)

    def of(self, tensors: tuple[Any, ...], options: tuple[Any, ...], make: Callable[..., Result]) -> Result:
        """What `make(tensors, options, eager=...)` returns, made once for plain eager calls of one signature.

        eager says that the call is such a one: nothing traces or intercepts it.
        """
        key = signature(tensors, options)
        if key is None:
            return make(tensors, options, eager=False)
        result = self.get(key)
        if result is None:
            result = make(tensors, options, eager=True)
            self.keep(key, result)
        return result

    def keep(self, key: Hashable, result: Result) -> None:
        """Have `get(key)` return the result from now on."""
        if len(self._results) >= LIMIT:
            self.clear()
        self._results[key] = result


def signature(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Hashable | None:
    """All that validation, choice and dispatch of a call depend on, but for the machine.

    None for anything but a plain eager call: while something traces, transforms or intercepts torch
    operations, for tensor subclasses, and for arguments that are not of the types that a valid call has.

    Args:
        tensors: q first; tensors or None. options: the other arguments; 1, 1.0 and True differ.
    """
    if torch.compiler.is_compiling() or _is_intercepted():
        return None
    types = tuple(map(type, options))
    if not _OPTION_TYPES.issuperset(types):
        return None
    parts: list[Hashable] = [options, types, _profiler_enabled()]
    for x in tensors:
        if x is None:
            parts.append(None)
        elif type(x) in _TENSOR_TYPES:
            parts.append((x.shape, x.dtype, x.device, x.layout, x.is_neg()))
        else:
            return None
    if records(tensors):
        parts.append(tuple(x is not None and (x.requires_grad, x.is_leaf) for x in tensors))
    if _is_any_autocast_enabled():
        parts.append(autocast_dtype(tensors[0], None))
    return tuple(parts)


def is_direct(tensors: tuple[Any, ...]) -> bool:
    """Whether a kernel called with the tensors of a plain eager call does what the dispatcher would do.

    Not where a gradient is recorded, a profiler expects the operator or a negation is still to be done.
    """
    lazy = any(x is not None and x.is_neg() for x in tensors)
    return not (lazy or records(tensors) or _profiler_enabled())


def records(tensors: tuple[Any, ...]) -> bool:
    """Whether autograd records operations on the tensors."""
    return torch.is_grad_enabled() and _any_requires_grad(*tensors)


def _is_intercepted() -> bool:
    return (
        _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
    )
