"""Forward-mode differentiation and torch.func transforms: what the rest of the package asks about them.

The kernels have derivatives in reverse mode alone. A dual number carries its tangent outside of what they
read, so without a check the tangent would be lost and the derivative come out as zero.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
    from torch._functorch.utils import enable_single_level_autograd_function

    _KNOWN = True
except ImportError:
    # private names: without them torch.func itself says what it cannot do
    _KNOWN = False


def is_forward_mode_on() -> bool:
    """Whether any tensor may carry a tangent now."""
    level: int = getattr(forward_ad, "_current_level", 0)
    return level >= 0


def is_dual(x: Any) -> bool:
    """Whether x is a tensor with a tangent, of the innermost transform where there are transforms."""
    return isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None


def refuse_tangents(op: str, args: Iterable[Any]) -> None:
    """RuntimeError for arguments of a registered op, of this name, with tangents, which it would lose."""
    if is_forward_mode_on() and any(map(is_dual, args)):
        raise RuntimeError(
            f"tfla_tk::{op} has no forward-mode derivative (jvp, dual numbers); "
            "use backend='reference', which has it, or reverse mode"
        )


def has_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors carries a tangent, of whichever transform. False where torch.compile
    traces: the op that it traces asks itself."""
    if torch.compiler.is_compiling() or not is_forward_mode_on():
        return False
    return any(_has_tangent(x) for x in tensors if x is not None)


def _has_tangent(x: Tensor) -> bool:
    if is_dual(x):
        return True
    if not is_transformed(x):
        return False
    with temporarily_pop_interpreter_stack():
        return _has_tangent(get_unwrapped(x))


def requires_grad(x: Tensor) -> bool:
    """`x.requires_grad`, of any of the transforms that x is in: vmap hides that of what it wraps."""
    return x.requires_grad or (is_transformed(x) and requires_grad(get_unwrapped(x)))


def is_transformed(x: Tensor) -> bool:
    """Whether x is in a torch.func transform; False where torch.compile traces."""
    return _KNOWN and not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(x)


def of_call(inputs: Iterable[Tensor | None], constants: Iterable[Tensor | None]) -> dict[str, Any]:
    """What differentiates or transforms a call, as fields of its description; constants have no gradients."""
    given = [x for x in inputs if x is not None]
    tensors = [*given, *(x for x in constants if x is not None)]
    return {
        "requires_grad": torch.is_grad_enabled() and any(map(requires_grad, given)),
        "forward_mode": has_tangent(tensors),
        "transformed": any(map(is_transformed, tensors)),
    }


def are_active() -> bool:
    """Whether an op that is called now is called by a transform."""
    return _KNOWN and peek_interpreter_stack() is not None


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` from an op's autograd kernel, under torch.func transforms, too.
    torch.autograd.Function.apply goes through all transforms by itself, which needs rules for each of
    them. A kernel of the dispatcher is called by one transform after the other, and records on that one's
    level."""
    if not are_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*args)


@cache
def _of_one_level(function: type[torch.autograd.Function]) -> Any:
    """The function as torch makes it for a level of its own: without what goes through the transforms."""
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    base = torch.autograd.Function.__base__
    return types.new_class(function.__name__, (base,), exec_body=lambda body: body.update(methods))


class _Excluding:
    """Where the dispatcher skips ADInplaceOrView and further keys: a private class of torch does it."""

    def __init__(self, *further: str) -> None:
        self._keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        for name in further:
            self._keys |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))

    def __enter__(self) -> None:
        self._guard = torch._C._ExcludeDispatchKeyGuard(self._keys)
        self._guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)


_exclude_autograd = partial(_Excluding, "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")

# contexts in which ops are dispatched below autograd, whose implementations call the others in it, and below
# the key that counts the versions of tensors
below_versions: Callable[[], Any] = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", _Excluding)
below_autograd: Callable[[], Any] = getattr(torch._C, "_AutoDispatchBelowAutograd", _exclude_autograd)


@contextmanager
def below_function() -> Iterator[None]:
    """Where the forward of an autograd function, applied by `apply`, calls its op again. Forwards run
    without grad mode, but the transforms around the one that applies this still have to record."""
    recording = are_active()
    with (
        torch.set_grad_enabled(recording or torch.is_grad_enabled()),
        forward_ad._set_fwd_grad_enabled(True) if recording else nullcontext(),
        below_autograd(),
    ):
        yield


def merge_into_batch(
    op: Callable[..., Any],
    *,
    cu_seqlens: int | None = None,
    heads: Sequence[int] = (),
    result_heads: Sequence[int] = (),
    per_head: Sequence[int] = (),
) -> Callable[..., Any]:
    """The rule of vmap for a registered op, as torch.library.register_vmap takes it: one call with the batch
    times as large. Packed sequences have a batch of one: there the heads are that many times as many, and
    where there is a tensor without a batch, too. op: all of its tensors and results begin with a batch, or
    are empty [0], but for those of per_head, arguments that are tensors [heads], or None. cu_seqlens: which
    argument holds the offsets of packed sequences, if any does. heads, result_heads: the dimension of the
    heads in each of the first arguments and results; 1 in the others."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        offsets = None if cu_seqlens is None else args[cu_seqlens]
        if cu_seqlens is not None and in_dims[cu_seqlens] is not None:
            raise RuntimeError(
                "vmap over cu_seqlens: expected the same offsets for all, got a batch of them; "
                "call once per entry"
            )

        by_batch = offsets is None and all(args[number] is None for number in per_head)

        def place(dims: Sequence[int], number: int) -> int:
            if by_batch:
                return 0
            return dims[number] if number < len(dims) else 1

        def merged(number: int, x: Any, batched: int | None) -> Any:
            if not isinstance(x, Tensor) or x is offsets or (batched is None and x.shape == (0,)):
                return x
            dim = place(heads, number)
            if batched is None:
                x = x.unsqueeze(dim).expand(*x.shape[:dim], info.batch_size, *x.shape[dim:])
            else:
                x = x.movedim(batched, dim)
            return x.flatten(dim, dim + 1)

        results = op(*map(merged, range(len(args)), args, in_dims))
        dims = [None if x.shape == (0,) else place(result_heads, number) for number, x in enumerate(results)]
        found = (
            x if dim is None else x.unflatten(dim, (info.batch_size, -1))
            for x, dim in zip(results, dims, strict=True)
        )
        return tuple(found), tuple(dims)

    return rule
