"""Gated linear attention by the ThunderKittens kernels, on the current stream; the protocol is that of
`ops.linear`.

The forward is one kernel, a walk over the chunks of every sequence, head and slice of V, launched once for
every 128 channels of K: the first writes o, the others add theirs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.operands import Operand, as_operand, as_state, current_stream
from tfla_tk.backends.tk.prepared import Addresses, Launches, operand_at, starts
from tfla_tk.backends.tk.refusals import named_schedule
from tfla_tk.build import instances
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import CHUNK, DTYPES, Kept, MaybeTensor
from tfla_tk.core.memo import Memo

_WALKER_COLUMNS = 64  # of V that a walker owns
_LAUNCH_DIM_K = max(instances.GLA_TILES)  # channels of one launch, at most


def forward(
    core: GLACore, *, output_final_state: bool, keep: bool
) -> tuple[Tensor, MaybeTensor, Kept | None]:
    """o [B, T, H, V], and the final state [N, H, K, V] or None; nothing is kept.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    core = _readable(core)
    key = (output_final_state, _layout(core))
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(core, output_final_state=output_final_state)
        _forwards.keep(key, prepared)
    return *prepared(core), None


def backward(
    core: GLACore,
    kept: Kept | None,
    final_state: MaybeTensor,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_gates: bool,
) -> tuple[MaybeTensor, ...]:
    """Not there yet: `support` refuses calls that record a gradient."""
    raise NotImplementedError("the kernels of GLA have no backward")


class Shape(NamedTuple):
    """Sizes of a call, as the kernels take them with its cut."""

    sequences: int
    batch: int
    heads: int
    seq: int
    dim_k: int
    dim_v: int
    half: bool
    device: int
    packed_64bit: bool

    @staticmethod
    def of(core: GLACore) -> Shape:
        """Of a call."""
        batch, seq, heads, dim_v = core.v.shape
        offsets = core.cu_seqlens
        return Shape(
            sequences=batch if offsets is None else offsets.shape[0] - 1,
            batch=batch,
            heads=heads,
            seq=seq,
            dim_k=core.q.shape[3],
            dim_v=dim_v,
            half=core.q.dtype == torch.float16,
            device=core.q.get_device(),
            packed_64bit=offsets is not None and offsets.dtype == torch.int64,
        )

    def with_offsets(self, address: int) -> tuple[int, ...]:
        """With the address of the offsets, 0 for none; every sequence is one segment."""
        chunks = self.seq // CHUNK + 1
        cut = (address, self.packed_64bit, self.sequences, self.sequences, chunks)
        return (*cut, *self[1:8])

    @property
    def walkers(self) -> int:
        """Per CTA: two share the work of the gate warps, which bound the time."""
        return 1 if self.dim_v <= _WALKER_COLUMNS else 2


class Forward:
    """The forward of calls whose tensors lie alike, as `_readable` leaves them."""

    def __init__(self, core: GLACore, *, output_final_state: bool) -> None:
        self._shape = shape = Shape.of(core)
        self._last_shape = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        self._output_final_state = output_final_state
        dim_k = min(shape.dim_k, _LAUNCH_DIM_K)
        kernel = build.load(instances.gla("forward", dim_k, named_schedule(core.schedule)))
        addresses = Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        o = operand_at(o_at, torch.empty_like(core.v, device="meta"))

        def launch(first: int) -> Any:
            """Of channels from `first` on."""
            dim = min(shape.dim_k - first, _LAUNCH_DIM_K)

            def channels(x: Operand, of: torch.dtype) -> Operand:
                return x[0] + first * of.itemsize, *x[1:]

            def rows(at: int) -> int:
                return at and at + first * shape.dim_v * torch.float32.itemsize

            return kernel.forward(
                shape._replace(dim_k=dim).with_offsets(offsets_at),
                channels(q, core.q.dtype), channels(k, core.k.dtype), v, o,
                channels(g, core.g.dtype), DTYPES[core.g.dtype],
                rows(initial_at), rows(last_at), core.scale, shape.walkers, shape.dim_k - dim, first > 0,
            )  # fmt: skip

        self._launches = Launches.of(kernel, [launch(n) for n in range(0, shape.dim_k, _LAUNCH_DIM_K)])

    def __call__(self, core: GLACore) -> tuple[Tensor, MaybeTensor]:
        """`forward` of these tensors."""
        v = core.v
        o = torch.empty_like(v)
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        tensors = (core.q, core.k, v, core.g, core.initial_state, core.cu_seqlens, o, last)
        self._launches.run(starts(*tensors), current_stream(self._shape.device))
        return o, last


def _readable(core: GLACore) -> GLACore:
    """The tensors as they lie where the kernels can take them so, else copies."""
    offsets = core.cu_seqlens
    return GLACore(
        as_operand(core.q),
        as_operand(core.k),
        as_operand(core.v),
        as_operand(core.g),
        as_state(core.initial_state),
        None if offsets is None else offsets.contiguous(),
        core.scale,
        core.schedule,
    )


def _layout(core: GLACore) -> Any:
    """All that the launch of a call depends on but for addresses."""
    q, k, v, g, initial_state, cu_seqlens, scale, schedule = core
    return (
        q.get_device(),
        q.dtype,
        q.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        g.stride(),
        g.dtype,
        initial_state is not None,
        None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype),
        scale,
        schedule,
    )


_forwards: Memo[Forward] = Memo()
