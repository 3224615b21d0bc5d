"""The backward of gated linear attention by the ThunderKittens kernels: three walks. Of the
forward they need its inputs alone and, where sequences are cut, the states at the borders between segments.

The forward's mirror is backward in time, for dv and the initial state's gradient; these are sums over K, as
the forward's are. Two walks are over the states of every segment, head and slice of K: forward in time for
dq, and backward in time for dk and dg, which needs q dq of the other one. They make sums over V and are
launched once for every 256 columns of it: the last launch makes the results, the others leave their sums.

Where sequences are cut into segments (`segments`), a launch before the walks gives the gradients of the
states at the borders. Where the forward has not kept the states there, another launch makes them again.
"""

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.channel_gate import call
from tfla_tk.backends.tk.channel_gate.call import OPERANDS, Shape, Slice
from tfla_tk.backends.tk.prepared import ADDRESS_ALIGNMENT, FLOAT, Gradients, Operand, current_stream, starts
from tfla_tk.build import instances
from tfla_tk.calls.linear import GLACore
from tfla_tk.core.layout import DTYPES, Cut, Kept, MaybeTensor
from tfla_tk.core.memo import Memo


def backward(
    core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor, *, needs_gates: bool
) -> Gradients:
    """dq, dk, dv, dg, dh0."""
    return _run(needs_gates, core, core, kept, do, dht)


def _run(
    needs_dg: bool, given: GLACore, core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor
) -> Gradients:
    """`backward`, where the tensors of core may be copies of those given, which gradients are like."""
    likes = None if given is core else prepared.strides(*given[:4])
    cut = None if kept is None else kept.layout
    key = needs_dg, likes, prepared.strides(do, dht), cut, prepared.layout_of(core)
    run = _backwards.get(key)
    if run is None:
        read, dout, last = prepared.readable(core, OPERANDS), prepared.as_operand(do), prepared.as_state(dht)
        if not prepared.are_same((*core, do, dht), (*read, dout, last)):
            # not kept: a key does not tell addresses, and tensors like these may need no copy
            return _run(needs_dg, given, read, kept, dout, last)
        run = Backward(given, core, do, dht, needs_dg=needs_dg, kept_cut=cut)
        _backwards.keep(key, run)
    return run(given, core, kept, do, dht)


class Backward:
    """The backward of calls whose tensors lie alike. given: q, k, v and g as the gradients are like them.
    core: as `readable` leaves it but for odd addresses; so are do and dht. kept_cut: the cut of the
    forward that has kept the states at the borders; None where they are made again."""

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
        if kept_cut is not None:
            shape = shape._replace(walks_cut=kept_cut)
        self._device, self._needs_dg = shape.device, needs_dg
        of_k, of_v = call.slices_of_k(shape.dim_k), call.slices_of_v(shape.dim_v)
        has_sums = len(of_v) > 1
        walks = [shape.walk("backward"), shape.states_walk("left"), shape.states_walk("right")]
        kernel = build.load(instances.GLA, *walks)
        addresses = prepared.Addresses()
        q, k, v, g = (prepared.operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        dout = prepared.operand_at(addresses.next(), do)
        dht_at = addresses.next(given=dht is not None)
        self._results = prepared.Results(given[:4], addresses)
        dq, dk, dv, dg = self._results.operands
        dh0_at = addresses.next(given=core.initial_state is not None)
        kept_at, scratch = addresses.next(), prepared.Scratch(addresses.next())
        of, of_gates = shape.with_offsets(offsets_at), DTYPES[core.g.dtype]
        inflow, flows_at, anchors_at, anchor_bytes = dg, 0, 0, 0
        if needs_dg:
            if core.g.dtype != torch.float32:  # else it is where dg is
                inflow_at = scratch.take(core.g.numel() * FLOAT)
                inflow = prepared.operand_at(inflow_at, torch.empty(core.g.shape, device="meta"))
            if dht is not None:
                flows_at = scratch.take(shape.sequences * shape.heads * shape.dim_k * FLOAT)
            anchor_bytes = kernel.anchor_bytes(of, shape.tile_v)  # of a slice of V
            anchors_at = scratch.take(anchor_bytes * len(of_v))
        # the mirror is done when the walks over the states begin
        part_bytes = kernel.part_bytes(of, shape.walkers) if len(of_k) > 1 else 0
        sums_at = part_at = scratch.take(max(part_bytes, kernel.sums_bytes(of) if has_sums else 0))
        d_borders_at = scratch.take(shape.borders_bytes)
        borders_at = kept_at if kept_cut is not None else scratch.take(shape.borders_bytes)
        self._scratch_size = scratch.bytes // core.q.itemsize

        def mirror_of(k_of: Slice) -> Any:
            return kernel.mirror(
                shape._replace(dim_k=k_of.dim).with_offsets(offsets_at),
                k_of.of(q, core.q.dtype), k_of.of(k, core.k.dtype), dout, dv,
                k_of.of(g, core.g.dtype), of_gates,
                k_of.of_states(dht_at, shape.dim_v), k_of.of_states(dh0_at, shape.dim_v),
                core.scale, shape.tile_k, shape.walkers, k_of.of_states(d_borders_at, shape.dim_v),
                k_of.with_part(part_at) if len(of_k) > 1 else None,
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
                result, gates, v_of.of_states(entering_at), core.scale, shape.tile_v, shape.walkers_of_states,
                (v_of.of_states(borders_at), v_of.of_states(d_borders_at)),
                (v_of.others, sums_at, is_first, is_last) if has_sums else None,
            )  # fmt: skip

        def borders_of(x: Operand, y: Operand, entering_at: int, at: int, scale: float, back: bool) -> Any:
            operands = x, y, g, of_gates
            return call.launch_segments(shape, offsets_at, operands, entering_at, at, scale, backward=back)

        before = []
        if borders_at and kept_cut is None:
            before += [borders_of(k, v, initial_at, borders_at, 1.0, False)]
        if d_borders_at:
            before += [borders_of(q, dout, dht_at, d_borders_at, core.scale, True)]
        numbers = range(len(of_v))
        self._run = build.launches(
            [
                *before,
                *(mirror_of(k_of) for k_of in of_k),
                *(states_of(kernel.left, dq, initial_at, n) for n in numbers),
                *(states_of(kernel.right, dk, dht_at, n) for n in numbers),
            ]
        )

    def __call__(
        self, given: GLACore, core: GLACore, kept: Kept | None, do: Tensor, dht: MaybeTensor
    ) -> Gradients:
        at = starts(*core[:6], do, dht)
        if (at[0] | at[1] | at[2] | at[3] | at[4] | at[6] | at[7]) % ADDRESS_ALIGNMENT:
            return _run(
                self._needs_dg,
                given,
                prepared.readable(core, OPERANDS),
                kept,
                prepared.as_operand(do),
                prepared.as_state(dht),
            )
        results, written = self._results.allocate(given[: 4 if self._needs_dg else 3])
        *of_operands, dg = written if self._needs_dg else (*written, None)
        initial = given.initial_state
        dh0 = None if initial is None else torch.empty_like(initial)
        # of q's dtype because that need not be said to torch, which is half of the time
        scratch = core.q.new_empty(self._scratch_size) if self._scratch_size else None
        dh0_written, borders = prepared.writable_state(dh0), None if kept is None else kept.tensors[0]
        at += starts(*of_operands, dg, dh0_written, borders, scratch)
        self._run(at, current_stream(self._device))
        prepared.Results.fill(results, written)
        dq, dk, dv, dg = results if self._needs_dg else (*results, None)
        return dq, dk, dv, dg, prepared.filled(dh0, dh0_written)


_backwards: Memo[Backward] = Memo()
