"""Gated linear attention by the ThunderKittens kernels, on the current stream; the protocol is that of
`ops.linear`.

The forward is one kernel, a walk over the chunks of every segment, head and slice of V, launched once for
every 128 channels of K: the first writes o, the others add theirs. The backward is three walks: its mirror,
backward in time, for dv and the initial state's gradient; and two over the states of every segment, head and
slice of K, forward in time for dq, and backward in time for dk and dg, which needs q dq of the other one.

Where sequences are cut into segments (`segments`), a launch before the walks gives the states at the borders
between segments, with which all walks begin at once; in the backward also their gradients. A training call
keeps the states for its backward; else nothing is kept but the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.channel_gate.segments import (
    count_borders,
    find_cut,
    launch_segments,
    new_borders,
)
from tfla_tk.backends.tk.operands import Operand, as_operand, as_state, current_stream, multiprocessors
from tfla_tk.backends.tk.prepared import Addresses, Launches, Result, operand_at, starts
from tfla_tk.backends.tk.refusals import named_schedule
from tfla_tk.build import instances
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import DTYPES, Cut, Kept, MaybeTensor
from tfla_tk.core.memo import Memo

_WALKER_COLUMNS = 64  # of V that a walker owns; of K in the walks over the states
_TWO_WALKERS_DIM_V = 128  # at most, in the walks over the states
_SLICE_V = 128  # of V, of a CTA of the forward, at most
_LAUNCH_DIM_K = max(instances.GLA_TILES)  # channels of one launch of the forward, at most


def forward(
    core: GLACore, *, output_final_state: bool, keep: bool
) -> tuple[Tensor, MaybeTensor, Kept | None]:
    """o [B, T, H, V], the final state [N, H, K, V] or None, and with `keep` the states at the borders and the
    cut, None where there are none.

    Raises:
        BuildError: The kernel is not compiled yet and cannot be.
        RuntimeError: The launch was refused.
    """
    core = _readable(core)
    key = (output_final_state, keep, _layout(core))
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(core, output_final_state=output_final_state, keep=keep)
        _forwards.keep(key, prepared)
    return prepared(core)


def backward(
    core: GLACore,
    kept: Kept | None,
    final_state: MaybeTensor,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_gates: bool,
) -> tuple[MaybeTensor, ...]:
    """dq, dk, dv, dg, dh0.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    given, core = core, _readable(core)
    do, dht = as_operand(do), as_state(dht)
    likes = tuple(x.stride() for x in given[:4])
    cut = None if kept is None else kept.layout
    key = (needs_gates, likes, do.stride(), dht is not None, cut, _layout(core))
    prepared = _backwards.get(key)
    if prepared is None:
        prepared = Backward(given, core, do, dht, needs_dg=needs_gates, kept_cut=cut)
        _backwards.keep(key, prepared)
    return prepared(given, core, do, dht, None if kept is None else kept.tensors[0])


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
    cut: Cut
    batch_invariant: bool

    @staticmethod
    def of(core: GLACore) -> Shape:
        """Of a call."""
        batch, seq, heads, dim_v = core.v.shape
        offsets, device = core.cu_seqlens, core.q.get_device()
        sequences = batch if offsets is None else offsets.shape[0] - 1
        return Shape(
            sequences=sequences,
            batch=batch,
            heads=heads,
            seq=seq,
            dim_k=core.q.shape[3],
            dim_v=dim_v,
            half=core.q.dtype == torch.float16,
            device=device,
            packed_64bit=offsets is not None and offsets.dtype == torch.int64,
            cut=find_cut(
                sequences,
                seq,
                heads * -(-dim_v // _SLICE_V),
                core.q.shape[3],
                multiprocessors(device),
                packed=offsets is not None,
                batch_invariant=core.batch_invariant,
            ),
            batch_invariant=core.batch_invariant,
        )

    def with_offsets(self, address: int) -> tuple[int, ...]:
        """With the address of the offsets, 0 for none."""
        return (address, self.packed_64bit, self.sequences, *self.cut, *self[1:8])

    @property
    def walkers(self) -> int:
        """Per CTA: two share the work of the gate warps, which bound the time."""
        return 1 if self.dim_v <= _WALKER_COLUMNS else 2

    @property
    def walkers_of_states(self) -> int:
        """Per CTA of the walks over the states: two share the loads of v and do, one alone is done earlier
        where there are multiprocessors for all. By head dims alone if a sequence's results must not depend
        on others: the sums for dg are rounded otherwise by a lone one."""
        columns = -(-self.dim_k // _WALKER_COLUMNS)
        if columns == 1 or self.dim_v > _TWO_WALKERS_DIM_V:
            return 1
        fill = self.cut.segments * self.heads * columns <= multiprocessors(self.device)
        return 1 if fill and not self.batch_invariant else 2


class Forward:
    """The forward of calls whose tensors lie alike, as `_readable` leaves them."""

    def __init__(self, core: GLACore, *, output_final_state: bool, keep: bool) -> None:
        self._shape = shape = Shape.of(core)
        self._last_shape = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        self._output_final_state, self._keep = output_final_state, keep
        dim_k = min(shape.dim_k, _LAUNCH_DIM_K)
        kernel = build.load(instances.gla("forward", dim_k, named_schedule(core.schedule)))
        addresses = Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        borders_at = addresses.next(given=count_borders(shape) > 0)
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
                rows(borders_at),
            )  # fmt: skip

        launches = [launch(n) for n in range(0, shape.dim_k, _LAUNCH_DIM_K)]
        if borders_at:
            before = launch_segments(
                shape,
                offsets_at,
                (k, v, g, DTYPES[core.g.dtype]),
                initial_at,
                borders_at,
                1.0,
                backward=False,
            )
            launches = [before, *launches]
        self._launches = Launches.of(kernel, launches)

    def __call__(self, core: GLACore) -> tuple[Tensor, MaybeTensor, Kept | None]:
        """`forward` of these tensors."""
        v = core.v
        o = torch.empty_like(v)
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        borders = new_borders(self._shape, v)
        tensors = (core.q, core.k, v, core.g, core.initial_state, core.cu_seqlens, o, last, borders)
        self._launches.run(starts(*tensors), current_stream(self._shape.device))
        kept = Kept((borders,), self._shape.cut) if self._keep and borders is not None else None
        return o, last, kept


class Backward:
    """The backward of calls whose tensors lie alike.

    Args:
        given: q, k, v and g as the gradients are like them.
        core: as `_readable` leaves it; so are do and dht.
        kept_cut: the cut of the forward that has kept the states at the borders; None where they are made
            again.
    """

    def __init__(
        self,
        given: GLACore,
        core: GLACore,
        do: Tensor,
        dht: MaybeTensor,
        *,
        needs_dg: bool,
        kept_cut: Cut | None,
    ) -> None:
        self._shape = shape = Shape.of(core)
        if kept_cut is not None:
            self._shape = shape = shape._replace(cut=kept_cut)
        self._needs_dg = needs_dg
        self._has_inflow = needs_dg and core.g.dtype != torch.float32  # else it is where dg is
        mirror = build.load(instances.gla("backward", shape.dim_k, named_schedule(core.schedule)))
        states = build.load(instances.gla_states(shape.dim_v))
        self._has_flows = needs_dg and dht is not None
        addresses = Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        dout = operand_at(addresses.next(), do)
        dht_at = addresses.next(given=dht is not None)
        dq, dk, dv, dg = (operand_at(addresses.next(), Result.like(x, "meta").written) for x in given[:4])
        dh0_at = addresses.next(given=core.initial_state is not None)
        inflow_at = addresses.next(given=self._has_inflow)
        flows_at = addresses.next(given=self._has_flows)
        anchors_at = addresses.next(given=needs_dg)
        borders_at, d_borders_at = (addresses.next(given=count_borders(shape) > 0) for _ in range(2))
        inflow = operand_at(inflow_at, torch.empty(core.g.shape, device="meta")) if inflow_at else dg
        gates = (inflow, dg, (dht_at, flows_at, anchors_at)) if needs_dg else None
        of, dtype = shape.with_offsets(offsets_at), DTYPES[core.g.dtype]
        self._anchor_bytes = states.anchor_bytes(of) if needs_dg else 0
        operands, options = (q, k, v, dout, g, dtype), (core.scale, shape.walkers_of_states)
        borders = (borders_at, d_borders_at)
        before = [
            launch_segments(shape, offsets_at, (*x, g, dtype), entering_at, at, scale, backward=backward)
            for x, entering_at, at, scale, backward, is_wanted in (
                ((k, v), initial_at, borders_at, 1.0, False, borders_at and kept_cut is None),
                ((q, dout), dht_at, d_borders_at, core.scale, True, borders_at),
            )
            if is_wanted
        ]
        self._launches = Launches.of(
            mirror,
            [
                *before,
                mirror.mirror(
                    of, q, k, dout, dv, g, dtype, dht_at, dh0_at, core.scale, shape.walkers, d_borders_at
                ),
                states.left(of, *operands, dq, gates, initial_at, *options, borders),
                states.right(of, *operands, dk, gates, dht_at, *options, borders),
            ],
        )

    def __call__(
        self, given: GLACore, core: GLACore, do: Tensor, dht: MaybeTensor, borders: MaybeTensor
    ) -> tuple[MaybeTensor, ...]:
        """`backward` of these tensors. borders: as a forward has kept them."""
        shape, q = self._shape, core.q
        results = [Result.like(x) for x in given[:3]]
        dg = Result.like(given.g) if self._needs_dg else None
        dh0 = None if core.initial_state is None else torch.empty_like(core.initial_state)
        inflow = flows = anchors = None
        if self._has_inflow:
            inflow = q.new_empty(core.g.shape, dtype=torch.float32)
        if self._has_flows:
            flows = q.new_empty((shape.sequences, shape.heads, shape.dim_k), dtype=torch.float32)
        if self._needs_dg:
            anchors = q.new_empty(self._anchor_bytes, dtype=torch.uint8)
        if borders is None:
            borders = new_borders(shape, q)
        d_borders = new_borders(shape, q)
        written = [x.written for x in results]
        self._launches.run(
            starts(
                *core[:6],
                do,
                dht,
                *written,
                None if dg is None else dg.written,
                dh0,
                inflow,
                flows,
                anchors,
                borders,
                d_borders,
            ),
            current_stream(shape.device),
        )
        return *(x.filled() for x in results), None if dg is None else dg.filled(), dh0


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
        core.batch_invariant,
        core.schedule,
    )


def _layout(core: GLACore) -> Any:
    """All that the launch of a call depends on but for addresses."""
    q, k, v, g, initial_state, cu_seqlens, *options = core
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
        *options,
    )


_forwards: Memo[Forward] = Memo()
_backwards: Memo[Backward] = Memo()
