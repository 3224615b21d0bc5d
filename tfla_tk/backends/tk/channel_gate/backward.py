"""The backward of gated linear attention by the ThunderKittens kernels: three walks. Of the
forward they need its inputs alone and, where sequences are cut, the states at the borders between segments.

The forward's mirror is backward in time, for dv and the initial state's gradient; these are sums over K, as
the forward's are. Two walks are over the states of every segment, head and slice of K: forward in time for
dq, and backward in time for dk and dg, which needs q dq of the other one. They make sums over V and are
launched once for every 256 columns of it: the last launch makes the results, the others leave their sums.

Where sequences are cut into segments (`segments`), a launch before the walks gives the gradients of the
states at the borders. Where the forward has not kept the states there, another launch makes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.channel_gate.call import (
    Shape,
    Slice,
    layout,
    readable,
    slices_of_k,
    slices_of_v,
)
from tfla_tk.backends.tk.channel_gate.segments import count_borders, launch_segments, new_borders
from tfla_tk.backends.tk.operands import Operand, as_operand, as_state, current_stream
from tfla_tk.backends.tk.prepared import Addresses, Launches, Result, operand_at, starts
from tfla_tk.backends.tk.refusals import named_schedule
from tfla_tk.build import instances
from tfla_tk.calls.gla import GLACore
from tfla_tk.core.layout import DTYPES, Cut, Kept, MaybeTensor
from tfla_tk.core.memo import Memo


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
    given, core = core, readable(core)
    do, dht = as_operand(do), as_state(dht)
    likes = tuple(x.stride() for x in given[:4])
    cut = None if kept is None else kept.layout
    key = (needs_gates, likes, do.stride(), dht is not None, cut, layout(core))
    prepared = _backwards.get(key)
    if prepared is None:
        prepared = Backward(given, core, do, dht, needs_dg=needs_gates, kept_cut=cut)
        _backwards.keep(key, prepared)
    return prepared(given, core, do, dht, None if kept is None else kept.tensors[0])


class Backward:
    """The backward of calls whose tensors lie alike.

    Args:
        given: q, k, v and g as the gradients are like them.
        core: as `readable` leaves it; so are do and dht.
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
        shape = Shape.of(core)
        self._shape = shape = shape if kept_cut is None else shape._replace(cut=kept_cut)
        self._needs_dg = needs_dg
        self._has_inflow = needs_dg and core.g.dtype != torch.float32  # else it is where dg is
        self._has_flows = needs_dg and dht is not None
        of_k, of_v = slices_of_k(shape.dim_k), slices_of_v(shape.dim_v)
        self._has_sums = len(of_v) > 1
        mirror = build.load(instances.gla("backward", of_k[0].dim, named_schedule(core.schedule)))
        states = build.load(instances.gla_states(of_v[0].dim))
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
        sums_at = addresses.next(given=self._has_sums)
        borders_at, d_borders_at = (addresses.next(given=count_borders(shape) > 0) for _ in range(2))
        inflow = operand_at(inflow_at, torch.empty(core.g.shape, device="meta")) if inflow_at else dg
        of, of_gates = shape.with_offsets(offsets_at), DTYPES[core.g.dtype]
        anchor_bytes = states.anchor_bytes(of) if needs_dg else 0  # of a slice of V
        self._anchor_bytes = anchor_bytes * len(of_v)
        self._sums_bytes = states.sums_bytes(of) if self._has_sums else 0

        def mirror_of(k_of: Slice) -> Any:
            return mirror.mirror(
                shape._replace(dim_k=k_of.dim).with_offsets(offsets_at),
                k_of.of(q, core.q.dtype), k_of.of(k, core.k.dtype), dout, dv,
                k_of.of(g, core.g.dtype), of_gates,
                k_of.of_states(dht_at, shape.dim_v), k_of.of_states(dh0_at, shape.dim_v),
                core.scale, shape.walkers, k_of.others, k_of.first > 0,
                k_of.of_states(d_borders_at, shape.dim_v),
            )  # fmt: skip

        def states_of(walk: Any, result: Operand, entering_at: int, number: int) -> Any:
            v_of = of_v[number]
            is_first, is_last = number == 0, number == len(of_v) - 1
            gates = None
            if needs_dg:
                at_anchors = anchors_at + number * anchor_bytes
                gates = inflow, dg, (v_of.of_states(dht_at), flows_at, at_anchors)
            return walk(
                shape._replace(dim_v=v_of.dim).with_offsets(offsets_at),
                q, k, v_of.of(v, core.v.dtype), v_of.of(dout, do.dtype), g, of_gates,
                result, gates, v_of.of_states(entering_at), core.scale, shape.walkers_of_states,
                (v_of.of_states(borders_at), v_of.of_states(d_borders_at)),
                (v_of.others, sums_at, is_first, is_last) if self._has_sums else None,
            )  # fmt: skip

        def borders_of(x: Operand, y: Operand, entering_at: int, at: int, scale: float, back: bool) -> Any:
            operands = x, y, g, of_gates
            return launch_segments(shape, offsets_at, operands, entering_at, at, scale, backward=back)

        before = []
        if borders_at and kept_cut is None:
            before += [borders_of(k, v, initial_at, borders_at, 1.0, False)]
        if d_borders_at:
            before += [borders_of(q, dout, dht_at, d_borders_at, core.scale, True)]
        numbers = range(len(of_v))
        self._launches = Launches.of(
            mirror,
            [
                *before,
                *(mirror_of(k_of) for k_of in of_k),
                *(states_of(states.left, dq, initial_at, n) for n in numbers),
                *(states_of(states.right, dk, dht_at, n) for n in numbers),
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
        inflow = flows = anchors = sums = None
        if self._has_inflow:
            inflow = q.new_empty(core.g.shape, dtype=torch.float32)
        if self._has_flows:
            flows = q.new_empty((shape.sequences, shape.heads, shape.dim_k), dtype=torch.float32)
        if self._needs_dg:
            anchors = q.new_empty(self._anchor_bytes, dtype=torch.uint8)
        if self._has_sums:
            sums = q.new_empty(self._sums_bytes, dtype=torch.uint8)
        if borders is None:
            borders = new_borders(shape, q)
        d_borders = new_borders(shape, q)
        written = [x.written for x in results]
        written_dg = None if dg is None else dg.written
        scratch = inflow, flows, anchors, sums, borders, d_borders
        self._launches.run(
            starts(*core[:6], do, dht, *written, written_dg, dh0, *scratch), current_stream(shape.device)
        )
        return *(x.filled() for x in results), None if dg is None else dg.filled(), dh0


_backwards: Memo[Backward] = Memo()
