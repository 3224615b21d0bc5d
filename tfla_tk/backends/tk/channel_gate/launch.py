"""Gated linear attention by the ThunderKittens kernels, on the current stream; the protocol is that of
`ops.linear`.

The forward is one kernel, a walk over the chunks of every segment, head and slice of V, launched once for
every 128 channels of K: all but the last leave their part of o for the next one. The backward is in
`backward`.

Where sequences are cut into segments (`segments`), a launch before the walks gives the states at the borders
between segments, with which all walks begin at once. A training call keeps them for its backward; else
nothing is kept but the inputs.
"""

from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.channel_gate.backward import backward
from tfla_tk.backends.tk.channel_gate.call import OPERANDS, Shape, Slice, launch_segments, slices_of_k
from tfla_tk.backends.tk.prepared import ADDRESS_ALIGNMENT, current_stream, operand_at, starts
from tfla_tk.build import instances
from tfla_tk.calls.linear import GLACore
from tfla_tk.core.layout import DTYPES, Kept, MaybeTensor, dense_like

__all__ = ["backward", "forward", "prepare"]


class Forward:
    """The forward of calls whose tensors lie alike, as `readable` leaves them but for odd addresses: o [B, T,
    H, V], the final state [N, H, K, V] or None, and with `keep` the states at the borders and the cut, None
    where there are none."""

    def __init__(self, core: GLACore, *, output_final_state: bool, keep: bool) -> None:
        shape = Shape.of(core)
        self._options = core[6:]
        self._device, self._cut = shape.device, shape.cut
        self._last_shape = shape.state_shape
        # of v's dtype because that need not be said to torch, which is half of the time
        self._borders_size = shape.borders_bytes // core.v.itemsize
        self._output_final_state, self._keep = output_final_state, keep
        of_k = slices_of_k(shape.dim_k)
        kernel = build.load(instances.GLA, shape.walk("forward"))
        addresses = prepared.Addresses()
        q, k, v, g = (operand_at(addresses.next(), x) for x in (core.q, core.k, core.v, core.g))
        initial_at = addresses.next(given=core.initial_state is not None)
        offsets_at = addresses.next(given=core.cu_seqlens is not None)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        borders_at = addresses.next(given=self._borders_size > 0)
        part_at = addresses.next(given=len(of_k) > 1)
        part_bytes = kernel.part_bytes(shape.with_offsets(offsets_at), shape.walkers) if len(of_k) > 1 else 0
        self._part_size = part_bytes // core.v.itemsize
        o = operand_at(o_at, dense_like(core.v, "meta"))
        of_gates = DTYPES[core.g.dtype]

        def launch(of: Slice) -> Any:
            return kernel.forward(
                shape._replace(dim_k=of.dim).with_offsets(offsets_at),
                of.of(q, core.q.dtype), of.of(k, core.k.dtype), v, o, of.of(g, core.g.dtype), of_gates,
                of.of_states(initial_at, shape.dim_v), of.of_states(last_at, shape.dim_v),
                core.scale, shape.tile_k, shape.walkers, of.of_states(borders_at, shape.dim_v),
                of.with_part(part_at) if len(of_k) > 1 else None,
            )  # fmt: skip

        launches = [launch(of) for of in of_k]
        if borders_at:
            operands = k, v, g, of_gates
            before = launch_segments(shape, offsets_at, operands, initial_at, borders_at, 1.0, backward=False)
            launches = [before, *launches]
        self._run = build.launches(launches)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: MaybeTensor, cu_seqlens: MaybeTensor
    ) -> tuple[Tensor, MaybeTensor, Kept | None]:
        at = starts(q, k, v, g, initial_state, cu_seqlens)
        if (at[0] | at[1] | at[2] | at[3] | at[4]) % ADDRESS_ALIGNMENT:
            core = GLACore(q, k, v, g, initial_state, cu_seqlens, *self._options)
            return forward(core, output_final_state=self._output_final_state, keep=self._keep)
        o = dense_like(v)
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        borders = v.new_empty(self._borders_size) if self._borders_size else None
        part = v.new_empty(self._part_size) if self._part_size else None
        at += starts(o, last, borders, part)
        self._run(at, current_stream(self._device))
        kept = Kept((borders,), self._cut) if self._keep and borders is not None else None
        return o, last, kept


_forwards = prepared.Forwards(Forward, OPERANDS)
forward, prepare = _forwards.run, _forwards.prepare
