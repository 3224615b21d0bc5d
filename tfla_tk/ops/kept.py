"""The registered ops of a family that keep what its kernels leave of a forward for the backward.

tfla_tk::<name>_fwd_kept and <name>_bwd_kept are <name>_fwd and <name>_bwd (`ops.linear`) beside autograd: the
first one also returns what the kernels have kept, one tensor of v's dtype, which the second one takes behind
dht. <name>_fwd records them where it can, so that no backward makes the forward again under torch.compile and
activation checkpointing. The kernels of such a family also have

    kept_layout(core) -> the layout of what a forward with `keep` leaves in one tensor of v's dtype: ints, of
                         which the first one is the number of elements

which follows from the metadata of core alone. It is an argument of <name>_fwd_kept, and of <name>_bwd_kept
behind what is kept. A graph from torch's cache on disk may have the layout of other kernels. Then what is
returned has that size, with nothing in it, and the backward of the kernels, whose layout is another one,
makes the forward again.
"""

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
    """These ops of a family. fwd, bwd: the ops."""

    def __init__(self, ops: "LinearOps") -> None:
        self._ops = ops
        self._inputs = len(ops.family.inputs)
        self._place = self._inputs + 2  # of what is kept and its layout, among the arguments of bwd
        self._names = f"{ops.family.name}_fwd_kept", f"{ops.family.name}_bwd_kept"
        self._define()
        self.fwd, self.bwd = (getattr(torch.ops.tfla_tk, name).default for name in self._names)
        self._implement()
        self._register()

    def layout(self, args: Sequence[Any]) -> tuple[int, ...] | None:
        """The layout of what a recorded call of <name>_fwd with these arguments should keep. None where no
        kernels run, a transform of torch.func would batch it, hooks would move it, or sizes are not known."""
        if not self._has_kernels(args[0]) or transforms.are_active() or not may_keep():
            return None
        sizes = [size for x in args[: self._inputs] if x is not None for size in x.shape]
        if not all(isinstance(size, int) for size in sizes) or args[2].numel() == 0:
            return None
        core, _ = self._ops.split(tuple(args))
        return self._ops.family.kernels().kept_layout(core)

    def _has_kernels(self, q: Tensor) -> bool:
        # fake tensors of a GPU are also on machines without one
        return q.device.type == "cuda" and torch.cuda.is_available()

    def _without(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return *args[: self._place], *args[self._place + 2 :]

    def _define(self) -> None:
        forward, backward = self._names
        inputs, options, grads = self._ops.arguments()
        define = library.get().define
        define(
            f"{forward}({inputs}, {options}, bool output_final_state, int[] layout)"
            " -> (Tensor o, Tensor final_state, Tensor kept)"
        )
        define(
            f"{backward}({inputs}, Tensor do, Tensor? dht, Tensor kept, int[] layout, {options},"
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
        for name, op, refusal in ((forward, self.fwd, no_gradients), (backward, self.bwd, self._ops.refusal)):
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
        *of_fwd, layout = args
        return *self._ops.fwd(*of_fwd), args[2].new_zeros(layout[0])

    def _fwd_fake(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *of_fwd, layout = args
        return *self._ops.fwd_fake(*of_fwd), args[2].new_empty(layout[0])

    def _fwd_cuda(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        core, (output_final_state, layout) = self._ops.split(args)
        forward = self._ops.family.kernels().forward
        o, last, kept = forward(core, output_final_state=output_final_state, keep=True)
        left = kept.tensors[0] if kept is not None and kept.layout == tuple(layout) else None
        return o, present(last, o), o.new_empty(layout[0]) if left is None else left

    def _bwd_cuda(self, *args: Any) -> tuple[Tensor, ...]:
        left, layout = args[self._place : self._place + 2]
        return self._ops.differentiate(Kept((left,), tuple(layout)), self._without(args))
