"""The registered ops of a family that keep what its kernels leave of a forward for the backward.

tfla_tk::<name>_fwd_kept and <name>_bwd_kept are <name>_fwd and <name>_bwd (`ops.linear`) beside autograd: the
first one also returns what the kernels have kept, one tensor of v's dtype, which the second one takes behind
dht. <name>_fwd records them where it can, so that no backward makes the forward again under torch.compile and
activation checkpointing. The kernels of such a family also have

    kept_size(core) -> how many elements of v's dtype a forward with `keep` leaves, in one tensor, whose
                       layout is None

which follows from the metadata of core alone. It is an argument of <name>_fwd_kept. A graph from torch's
cache on disk may have the size of other kernels. Then what is returned is of that size, with nothing in it,
and the backward of the kernels, which wants another size, makes the forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import Kept, present
from tfla_tk.core.memo import may_keep
from tfla_tk.ops import autograd

if TYPE_CHECKING:
    from tfla_tk.ops.linear import LinearOps


class KeepingOps:
    """These ops of a family.

    Attributes:
        fwd, bwd: the ops.
    """

    def __init__(self, ops: LinearOps) -> None:
        self._ops = ops
        self._inputs = len(ops.family.inputs)
        self._place = self._inputs + 2  # of what is kept, among the arguments of bwd
        self._names = f"{ops.family.name}_fwd_kept", f"{ops.family.name}_bwd_kept"
        self._define()
        self.fwd, self.bwd = (getattr(torch.ops.tfla_tk, name).default for name in self._names)
        self._implement()
        self._register()

    def size(self, args: Sequence[Any]) -> int:
        """Elements of what a recorded call of <name>_fwd with these arguments should keep. 0 where no kernels
        run, a transform of torch.func would batch it, hooks would move it, or sizes are not known."""
        if not self._has_kernels(args[0]) or transforms.are_active() or not may_keep():
            return 0
        sizes = [size for x in args[: self._inputs] if x is not None for size in x.shape]
        if not all(isinstance(size, int) for size in sizes) or args[2].numel() == 0:
            return 0
        core, _ = self._ops.split(tuple(args))
        size: int = self._ops.family.kernels().kept_size(core)
        return size

    def _has_kernels(self, q: Tensor) -> bool:
        # fake tensors of a GPU are also on machines without one
        return q.device.type == "cuda" and torch.cuda.is_available()

    def _without(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of <name>_bwd."""
        return *args[: self._place], *args[self._place + 1 :]

    def _define(self) -> None:
        forward, backward = self._names
        inputs, options, grads = self._ops.arguments()
        define = library.get().define
        define(
            f"{forward}({inputs}, {options}, bool output_final_state, int size)"
            " -> (Tensor o, Tensor final_state, Tensor kept)"
        )
        define(
            f"{backward}({inputs}, Tensor do, Tensor? dht, Tensor kept, {options},"
            f" bool needs_gates) -> ({grads})"
        )

    def _implement(self) -> None:
        forward, backward = self._names
        impl = library.get().impl
        impl(forward, self._fwd_cpu, "CPU")
        impl(forward, self._fwd_cuda, "CUDA")
        impl(backward, lambda *args: self._ops.bwd(*self._without(args)), "CPU")
        impl(backward, self._bwd_cuda, "CUDA")
        no_gradients = f"tfla_tk::{forward} records nothing; {forward.removesuffix('_kept')} does"
        for name, op, refusal in (
            (forward, self.fwd, no_gradients),
            (backward, self.bwd, self._ops.refusal),
        ):
            refusing = autograd.refusing(name, op, refusal)
            impl(name, autograd.recording(name, op, refusing), "Autograd")

    def _register(self) -> None:
        forward, backward = self._names
        our_library = library.get()
        our_library.register_fake(forward, self._fwd_fake)
        our_library.register_fake(backward, lambda *args: self._ops.bwd_fake(*self._without(args)))
        # what is kept is of one call, not of one that is as many times as large
        our_library.register_vmap(
            backward,
            lambda info, in_dims, *args: self._ops.bwd_vmap(
                info, self._without(in_dims), *self._without(args)
            ),
        )
        for name, count in zip(self._names, self._ops.family.flops, strict=True):
            flops.register(name, count)

    def _fwd_cpu(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *of_fwd, size = args
        return *self._ops.fwd(*of_fwd), args[2].new_zeros(size)

    def _fwd_fake(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *of_fwd, size = args
        return *self._ops.fwd_fake(*of_fwd), args[2].new_empty(size)

    def _fwd_cuda(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        core, (output_final_state, size) = self._ops.split(args)
        forward = self._ops.family.kernels().forward
        o, last, kept = forward(core, output_final_state=output_final_state, keep=True)
        left = None if kept is None else kept.tensors[0]
        if left is None or left.numel() != size:
            left = o.new_empty(size)
        return o, present(last, o), left

    def _bwd_cuda(self, *args: Any) -> tuple[Tensor, ...]:
        return self._ops.differentiate(Kept((args[self._place],)), self._without(args))
