"""What the registered ops of all families do about autograd: record a backward op, or refuse.

An op's kernel for the Autograd key is `recording` or `without_gradients`; what records is a `function`.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from tfla_tk.core import transforms
from tfla_tk.core.eager import dispatch_like, is_eager, is_plain, records
from tfla_tk.core.layout import MaybeTensor


class Recorded(NamedTuple):
    """What the forward of an autograd function has come to."""

    outputs: tuple[MaybeTensor, ...]  # of the function; None for what there is not
    constants: tuple[Tensor, ...]  # those of the outputs that no gradient flows through
    # the tensors that the backward needs; copies of those that callers may write over
    saved: Sequence[MaybeTensor]
    options: Any  # what else it needs, of any kind


def function(
    name: str,
    forward: Callable[..., Recorded],
    backward: Callable[[Sequence[Any], Any, tuple[MaybeTensor, ...]], Sequence[MaybeTensor]],
    *,
    once: bool = False,
) -> type[torch.autograd.Function]:
    """An autograd function. forward: of its arguments. backward: of what forward has saved, its options, and
    the gradients of the outputs, None for zeros; returns the gradients of the leading arguments, the others
    have none. once: its backward cannot be differentiated, and says so."""

    def run(ctx: Any, *args: Any) -> tuple[MaybeTensor, ...]:
        found = forward(*args)
        ctx.save_for_backward(*found.saved)
        ctx.options = found.options
        if found.constants:
            ctx.mark_non_differentiable(*found.constants)
        ctx.set_materialize_grads(False)
        return found.outputs

    def run_back(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        return _needed(ctx.needs_input_grad, backward(ctx.saved_tensors, ctx.options, grads))

    methods = {"forward": run, "backward": once_differentiable(run_back) if once else run_back}
    body = {method: staticmethod(function) for method, function in methods.items()}
    return types.new_class(
        name, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(body)
    )


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What torch.autograd.Function.apply calls where no transform of torch.func is near."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def refusing(name: str, op: Callable[..., Any], message: str) -> type[torch.autograd.Function]:
    """An autograd function that calls an op and whose backward raises RuntimeError: where a second
    derivative would be."""

    def forward(*args: Any) -> Recorded:
        with transforms.below_function():
            return Recorded(op(*args), (), (), None)

    def backward(saved: Sequence[Any], options: Any, grads: tuple[MaybeTensor, ...]) -> Sequence[MaybeTensor]:
        raise RuntimeError(message)

    return function(name, forward, backward)


def recording(
    name: str, op: Callable[..., Any], recorder: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """The kernel of an op for the Autograd key; the recorder is applied where a gradient is recorded."""

    def call(*args: Any) -> Any:
        # torch leaves out what a default stands for
        args = (*args, *(argument.default_value for argument in op._schema.arguments[len(args) :]))  # type: ignore[attr-defined]
        transforms.refuse_tangents(name, args)
        if records(args):
            return transforms.apply(recorder, *args)
        with transforms.below_autograd():
            return op(*args)

    return call


def without_gradients(name: str, op: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """The kernel for the Autograd key of an op that has no gradients; so many of its arguments, from the
    first on, would have them, the others are constants of the differentiation."""

    def call(*args: Any) -> Any:
        transforms.refuse_tangents(name, args)
        if records(args[:inputs]):
            raise RuntimeError(
                f"tfla_tk::{name} has no gradients; "
                "use backend='reference', which has them, or torch.no_grad()"
            )
        with transforms.below_autograd():
            return op(*args)

    return call


def noting_writes(
    in_place: Callable[..., Any], written: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
) -> Callable[..., Any]:
    """in_place, after which autograd knows what was written, from its arguments. A kernel writes by
    address, so nothing else would tell autograd that what it may have saved has changed."""

    def call(*args: Any) -> Any:
        result = in_place(*args)
        increment_version(written(args))
        return result

    return call


def below_versions(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op below the key that counts the versions of tensors."""

    def call(*args: Any) -> Any:
        with transforms.below_versions():
            return op(*args)

    return call


def is_plain_backward(tensors: tuple[Any, ...], grads: tuple[MaybeTensor, ...]) -> bool:
    """Whether a backward may call its kernels themselves, not the op; grads are as autograd hands them
    over."""
    # gradients are recorded for a second derivative alone
    recorded = torch.is_grad_enabled()
    return not recorded and is_eager(tensors) and is_plain(tensors) and dispatch_like(tensors[0], grads)


def _needed(needed: Sequence[bool], grads: Sequence[MaybeTensor]) -> tuple[MaybeTensor, ...]:
    """For every argument of the forward its gradient, or None where nobody asks for it."""
    found = [grad if asked else None for grad, asked in zip(grads, needed, strict=False)]
    found += [None] * (len(needed) - len(found))
    return tuple(found)
