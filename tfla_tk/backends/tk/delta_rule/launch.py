"""The delta rule by the ThunderKittens kernels, on the current stream; the protocol is that of `ops.linear`.

The forward has two kernels: of every chunk in parallel what depends on q, k and the gates alone, A and P, and
the walk over the chunks. Where the walk leaves multiprocessors idle, one launch has both: makers of A and P
run beside the walk. A training call keeps A and P, the walk's writes, [B, T, HV, V] (beta U'; U' where beta
is near 0, docs/delta-rule-backward.md), and the states at the borders between the segments of the backward's
walks over the states.

Few long sequences are split: two launches before the walk give the states with which its segments begin. Over
a segment the state is mapped S -> M S + own; a training call keeps M for its backward, whose first walk is
split in the same way.

The backward walks over the chunks backward in time, with the same A and P, which gives dv and the sums of
dbeta. Two more walks over the states give the rest (`states`): forward in time dq and the
part of dk from what a token erases, backward in time dk. The gradient of g follows from their sums. These two
are cut into segments. They begin with what others have left at the borders between segments: the states, by
the forward, and their gradients, by the backward's first walk.

Where several heads of v share a head of q and k, a last kernel adds up their dq and dk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule import inputs
from tfla_tk.backends.tk.delta_rule.call import (
    NO_OPERAND,
    SUM_COLUMNS,
    Shape,
    gate_at,
    layout,
    new_states,
    number,
)
from tfla_tk.backends.tk.delta_rule.states import Through, walk_states
from tfla_tk.backends.tk.operands import as_operand, as_state, current_stream
from tfla_tk.backends.tk.prepared import Addresses, Launches, Result, operand_at, starts
from tfla_tk.backends.tk.refusals import named_schedule
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import Kept, MaybeTensor
from tfla_tk.core.memo import Memo

Gradients: TypeAlias = tuple[MaybeTensor, ...]


def forward(
    core: DeltaRuleCore, *, output_final_state: bool, keep: bool
) -> tuple[Tensor, MaybeTensor, Kept | None]:
    """o [B, T, HV, V], the final state [N, HV, K, V] or None, and with `keep` the writes, the states at the
    borders and M of the segments of a split, None where there are none, and A and P.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    like = core.v
    _, core = inputs.made(core)
    key = (output_final_state, keep, like.stride(), layout(core))
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(core, like, output_final_state=output_final_state, keep=keep)
        _forwards.keep(key, prepared)
    return prepared(core, like)


def prepare(
    core: DeltaRuleCore, *, output_final_state: bool, keep: bool
) -> Callable[..., tuple[Tensor, MaybeTensor, Kept | None]]:
    """`forward` of the tensors of all calls whose tensors lie like these."""
    options = core[9:]
    return lambda *tensors: forward(
        DeltaRuleCore._make((*tensors, *options)), output_final_state=output_final_state, keep=keep
    )


def backward(
    core: DeltaRuleCore,
    kept: Kept | None,
    final_state: MaybeTensor,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_gates: bool,
) -> Gradients:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    given, made = inputs.made(core)
    found = _backward(given, made, kept, do, dht, needs_gates=needs_gates)
    return inputs.gradients(core, found, needs_gates=needs_gates)


def _backward(
    given: DeltaRuleCore,
    core: DeltaRuleCore,
    kept: Kept | None,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_gates: bool,
) -> Gradients:
    """`backward` of what the inputs have been made into."""
    do, dht = as_operand(do), as_state(dht)
    if kept is None:
        _, _, kept = forward(core, output_final_state=False, keep=True)
    assert kept is not None
    writes, borders, maps, matrices = kept.tensors
    key = (layout(core), given.v.stride(), do.stride(), dht is not None)
    mirror = _mirrors.get(key)
    if mirror is None:
        mirror = Mirror(core, given.v, do, dht)
        _mirrors.keep(key, mirror)
    assert writes is not None and matrices is not None
    dv, dbeta_parts, dh0, d_borders = mirror(core, given.v, matrices, writes, maps, do, dht)
    needs_dg = needs_gates and core.g is not None
    through = Through(writes, dv.written, do, dht, borders, d_borders)
    dq, dk, dg = walk_states(given, core, through, needs_dg=needs_dg)
    if dq.shape != given.q.shape:
        dq, dk = _combine(given, core, dq, dk)
    dbeta = torch.empty_like(given.beta).copy_(_sum_of_parts(dbeta_parts).transpose(1, 2))
    return dq, dk, dv.filled(), dg, dbeta, None, None, dh0


class Forward:
    """The forward of calls whose tensors lie alike, as `readable` leaves them.

    Args:
        like: v as it was given, which o is like.
    """

    def __init__(self, core: DeltaRuleCore, like: Tensor, *, output_final_state: bool, keep: bool) -> None:
        shape = Shape.of(core)
        self._device, self._matrices_size = shape.device, shape.matrices_size
        self._last_shape = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        self._output_final_state, self._keep = output_final_state, keep
        kernel = build.load(instances.delta_rule("forward", shape.dim_k, named_schedule(core.schedule)))
        at, addresses = number(core)
        matrices = shape.matrices_at(addresses.next())
        o_at, writes_at = addresses.next(), addresses.next(given=keep)
        last_at = addresses.next(given=output_final_state)
        carried, is_split = shape.carried, shape.carried > 0
        self._borders_size = shape.states_size(shape.borders, shape.dim_v) if keep else None
        self._carried_size = shape.states_size(carried, shape.dim_v)
        self._transposed_size = shape.states_size(carried, shape.dim_k)
        borders_at = addresses.next(given=self._borders_size is not None)
        carried_at, maps_at, transposed_at = (
            addresses.next(given=given) for given in (is_split, is_split and keep, is_split)
        )
        whole, of = (shape.with_offsets(at.cu_seqlens, cut) for cut in (None, shape.split))
        gates = (gate_at(at.g, core.g), gate_at(at.beta, core.beta))
        q, k, v = (operand_at(*x) for x in ((at.q, core.q), (at.k, core.k), (at.v, core.v)))
        o = Result.like(like, "meta").written
        writes = operand_at(writes_at, torch.empty(core.v.shape, device="meta")) if keep else NO_OPERAND
        walk = kernel.forward(
            of, q, k, v, operand_at(o_at, o), writes, *gates, matrices, at.initial_state, last_at,
            carried_at, borders_at, core.scale, shape.walkers, shape.makers,
        )  # fmt: skip
        before = [] if shape.makers else [kernel.matrices(whole, q, k, *gates, matrices[:2], core.scale)]
        if is_split:
            maps = (maps_at, transposed_at)
            before += [
                kernel.maps(of, k, v, *gates, matrices[0], at.initial_state, carried_at, maps),
                kernel.carry(of, carried_at, transposed_at, borders_at),
            ]
        self._launches = Launches.of(kernel, [*before, walk])

    def __call__(self, core: DeltaRuleCore, like: Tensor) -> tuple[Tensor, MaybeTensor, Kept | None]:
        """`forward` of these tensors."""
        v, o = core.v, Result.like(like)
        matrices = v.new_empty(self._matrices_size)
        writes = v.new_empty(v.shape) if self._keep else None
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        borders, carried = new_states(v, self._borders_size), new_states(v, self._carried_size)
        transposed = new_states(v, self._transposed_size)
        maps = new_states(v, self._transposed_size) if self._keep else None
        self._launches.run(
            starts(*core[:9], matrices, o.written, writes, last, borders, carried, maps, transposed),
            current_stream(self._device),
        )
        return o.filled(), last, None if writes is None else Kept((writes, borders, maps, matrices))


class Mirror:
    """The backward's walk of calls whose tensors lie alike, as `readable` leaves them.

    Args:
        like: v as it was given, which dv is like.
    """

    def __init__(self, core: DeltaRuleCore, like: Tensor, do: Tensor, dht: MaybeTensor) -> None:
        shape = Shape.of(core)
        parts = -(-shape.dim_v // SUM_COLUMNS)
        self._device = shape.device
        self._borders_size = shape.states_size(shape.borders, shape.dim_v)
        self._carried_size = shape.states_size(shape.carried, shape.dim_v)
        self._sums_shape = (parts, shape.batch, shape.heads, shape.seq)
        kernel = build.load(instances.delta_rule("backward", shape.dim_k, named_schedule(core.schedule)))
        at, addresses = number(core)
        matrices = shape.matrices_at(addresses.next())[:2]
        do_at, writes_at, dv_at = (addresses.next() for _ in range(3))
        sums_at = addresses.next()
        dht_at = addresses.next(given=dht is not None)
        dh0_at = addresses.next(given=core.initial_state is not None)
        borders_at = addresses.next(given=self._borders_size is not None)
        carried_at, maps_at = (addresses.next(given=self._carried_size is not None) for _ in range(2))
        of = shape.with_offsets(at.cu_seqlens, shape.split)
        gates = (gate_at(at.g, core.g), gate_at(at.beta, core.beta))
        q, k = operand_at(at.q, core.q), operand_at(at.k, core.k)
        dense = torch.empty(core.v.shape, device="meta")
        dout, dv = operand_at(do_at, do), operand_at(dv_at, Result.like(like, "meta").written)
        walk = kernel.mirror(
            of, q, k, dout, operand_at(writes_at, dense), dv, *gates, matrices, sums_at, dht_at, dh0_at,
            carried_at, borders_at, core.scale, shape.walkers, False,
        )  # fmt: skip
        before = []
        if carried_at:
            before = [
                kernel.mirror(
                    of, q, k, dout, NO_OPERAND, NO_OPERAND, *gates, matrices, 0, dht_at, 0,
                    carried_at, 0, core.scale, shape.walkers, True,
                ),
                kernel.carry(of, carried_at, maps_at, borders_at),
            ]  # fmt: skip
        self._launches = Launches.of(kernel, [*before, walk])

    def __call__(
        self,
        core: DeltaRuleCore,
        like: Tensor,
        matrices: Tensor,
        writes: Tensor,
        maps: MaybeTensor,
        do: Tensor,
        dht: MaybeTensor,
    ) -> tuple[Result, Tensor, MaybeTensor, MaybeTensor]:
        """dv, the parts of dbeta [parts, B, HV, T], dh0 and dS at the borders."""
        v, initial = core.v, core.initial_state
        dv = Result.like(like)
        sums = v.new_empty(self._sums_shape, dtype=torch.float32)
        dh0 = None if initial is None else torch.empty_like(initial)
        borders, carried = new_states(v, self._borders_size), new_states(v, self._carried_size)
        self._launches.run(
            starts(*core[:9], matrices, do, writes, dv.written, sums, dht, dh0, borders, carried, maps),
            current_stream(self._device),
        )
        return dv, sums, dh0, borders


def _combine(
    given: DeltaRuleCore, core: DeltaRuleCore, dq_of_heads: Tensor, dk_of_heads: Tensor
) -> tuple[Tensor, Tensor]:
    """dq and dk, like q and k as they were given, from those of every head of v."""
    dq, dk = Result.like(given.q), Result.like(given.k)
    operands = (dq_of_heads, dk_of_heads, dq.written, dk.written)
    key = (layout(core), *(x.stride() for x in operands))
    launches = _combines.get(key)
    if launches is None:
        shape = Shape.of(core)
        kernel = build.load(instances.delta_rule("backward", shape.dim_k, named_schedule(core.schedule)))
        addresses = Addresses()
        prepared = [operand_at(addresses.next(), x) for x in operands]
        launches = Launches.of(kernel, [kernel.combine(shape.with_offsets(0), *prepared)])
        _combines.keep(key, launches)
    launches.run(starts(*operands), current_stream(core.q.get_device()))
    return dq.filled(), dk.filled()


def _sum_of_parts(parts: Tensor) -> Tensor:
    """The sum over the first dimension, always in the same order: of a lone number torch has another one."""
    if parts[0].numel() == 1:
        return torch.sum(torch.cat((parts, parts), dim=-1), dim=0)[..., :1]
    return torch.sum(parts, dim=0)


_forwards: Memo[Forward] = Memo()
_mirrors: Memo[Mirror] = Memo()
_combines: Memo[Launches] = Memo()
