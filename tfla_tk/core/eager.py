"""What a call is to torch: eager, plain, recorded by autograd, shown by a profiler."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tfla_tk.core.checks import autocast_dtype
from tfla_tk.core.invariance import is_batch_invariant
from tfla_tk.core.transforms import is_forward_mode_on

is_wrapped: Any = None  # tells whether torch.func has wrapped a tensor; None without KNOWS_EAGER_CALLS

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
    KNOWS_EAGER_CALLS, is_wrapped = _KNOWS_HOOKS, is_functorch_wrapped_tensor

_TENSOR_TYPES = {Tensor, torch.nn.Parameter, type(None)}

Result = TypeVar("Result")


def is_eager(tensors: tuple[Any, ...]) -> bool:
    """Whether nothing traces, transforms or intercepts torch operations on these tensors or Nones."""
    return not is_watched() and _TENSOR_TYPES.issuperset(map(type, tensors))


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
    """Whether a kernel does all that the op would do: nothing is left to negate (`is_plain`), no gradient is
    recorded, and no profiler expects the operator."""
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


def is_watched() -> bool:
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


def modes(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call depends on beside its arguments and grad mode: a profiler, batch invariance, autocast. To
    ask where KNOWS_EAGER_CALLS."""
    autocast = autocast_dtype(tensors[0], None) if _is_any_autocast_enabled() else None
    return _profiler_enabled(), is_batch_invariant(), autocast


def comparison_with(tensors: Sequence[Tensor], *, strided: bool) -> Callable[..., bool] | None:
    """What tells whether as many dense tensors have the metadata of these; strided: strides, too. torch's own
    guards compare all of them in a call, but end the process where one is nested. None where torch's version
    makes them of other arguments."""
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) if strided else [None] * x.dim() for x in tensors]
    with suppress(TypeError):
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return None
