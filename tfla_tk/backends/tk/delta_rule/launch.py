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

Heads of v that share a head of q and k add up their dq and dk in these walks, a few of them: where a head of
q and k has more, a last kernel adds up the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule import inputs
from tfla_tk.backends.tk.delta_rule.call import (
    NO_OPERAND,
    SUM_COLUMNS,
    Shape,
    gate_at,
    is_aligned,
    layout,
    new_states,
    number,
    readable,
)
from tfla_tk.backends.tk.delta_rule.inputs import Inputs, Wanted
from tfla_tk.backends.tk.delta_rule.states import States, Through
from tfla_tk.backends.tk.operands import as_operand, as_state, current_stream
from tfla_tk.backends.tk.prepared import Addresses, Launches, Result, Scratch, operand_at, starts
from tfla_tk.backends.tk.refusals import named_schedule
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import Kept, MaybeTensor
from tfla_tk.core.memo import Memo

Outputs: TypeAlias = tuple[Tensor, MaybeTensor, Kept | None]  # o, the final state, what is kept
Gradients: TypeAlias = tuple[MaybeTensor, ...]


def forward(core: DeltaRuleCore, *, output_final_state: bool, keep: bool) -> Outputs:
    """o [B, T, HV, V], the final state [N, HV, K, V] or None, and with `keep` the writes, the states at the
    borders and M of the segments of a split, None where there are none, and A and P.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    read = readable(core)
    key = output_final_state, keep, layout(core, read)
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(core, read, output_final_state=output_final_state, keep=keep)
        _forwards.keep(key, prepared)
    return prepared(core, read)


def prepare(core: DeltaRuleCore, *, output_final_state: bool, keep: bool) -> Callable[..., Outputs]:
    """`forward` of the tensors of all calls whose tensors lie like these."""
    options = core[9:]
    prepared = None
    if readable(core) is core:
        prepared = Forward(core, core, output_final_state=output_final_state, keep=keep)

    def run(*tensors: Any) -> Outputs:
        core = DeltaRuleCore._make((*tensors, *options))
        if prepared is not None and is_aligned(core):
            return prepared(core, core)
        return forward(core, output_final_state=output_final_state, keep=keep)

    return run


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
    read, do, dht = readable(core), as_operand(do), as_state(dht)
    key = needs_gates, do.stride(), dht is not None, layout(core, read)
    prepared = _backwards.get(key)
    if prepared is None:
        prepared = Backward(core, read, needs_gates=needs_gates)
        _backwards.keep(key, prepared)
    return prepared(core, read, kept, do, dht)


class Forward:
    """The forward of calls whose tensors lie alike.

    Args:
        read: the call as `readable` leaves it.
    """

    def __init__(
        self, core: DeltaRuleCore, read: DeltaRuleCore, *, output_final_state: bool, keep: bool
    ) -> None:
        wanted = Wanted.of(core)
        self._inputs = Inputs(core, read, wanted) if any(wanted) else None
        self._walk: Walk | None = None  # of what the inputs are made into, which the first call has
        self._output_final_state, self._keep = output_final_state, keep

    def __call__(self, core: DeltaRuleCore, read: DeltaRuleCore) -> Outputs:
        """`forward` of these tensors."""
        made = read if self._inputs is None else self._inputs(core, read)
        if self._walk is None:
            options = self._output_final_state, self._keep
            self._walk = Walk(made, core.v, output_final_state=options[0], keep=options[1])
        return self._walk(made, core.v)


class Backward:
    """The backward of calls whose tensors and gradients lie alike.

    Its parts are prepared by the first call, which has what others of them leave.

    Args:
        read: the call as `readable` leaves it.
    """

    def __init__(self, core: DeltaRuleCore, read: DeltaRuleCore, *, needs_gates: bool) -> None:
        wanted = Wanted.of(core)
        self._inputs = Inputs(core, read, wanted) if any(wanted) else None
        self._wanted = wanted._replace(decay=wanted.decay and needs_gates)  # gradients
        self._needs_dg = needs_gates and core.g is not None
        self._mirror: Mirror | None = None
        self._states: States | None = None
        self._combine: Combine | None = None
        self._gradients: inputs.Gradients | None = None

    def __call__(
        self, core: DeltaRuleCore, read: DeltaRuleCore, kept: Kept | None, do: Tensor, dht: MaybeTensor
    ) -> Gradients:
        """`backward` of these tensors; do and dht as kernels read them."""
        given, made = core, read
        if self._inputs is not None:
            made = self._inputs(core, read)
            given = made if read is core else self._inputs.given(core, made)
        if kept is None:
            _, _, kept = forward(made, output_final_state=False, keep=True)
        assert kept is not None
        writes, borders, maps, matrices = kept.tensors
        assert writes is not None and matrices is not None
        if self._mirror is None:
            self._mirror = Mirror(made, given.v, do, dht)
        dv, dbeta_parts, dh0, d_borders = self._mirror(made, given.v, matrices, writes, maps, do, dht)
        through = Through(writes, dv.written, do, dht, borders, d_borders)
        if self._states is None:
            self._states = States(given, made, through, needs_dg=self._needs_dg)
        dq, dk, dg = self._states(given, made, through)
        if dq.shape[2] != given.q.shape[2]:
            if self._combine is None:
                self._combine = Combine(given, made, dq, dk)
            dq, dk = self._combine(given, dq, dk)
        dbeta = torch.empty_like(given.beta).copy_(_sum_of_parts(dbeta_parts).transpose(1, 2))
        found = dq, dk, dv.filled(), dg, dbeta, None, None, dh0
        if not any(self._wanted):
            return found
        if self._gradients is None:
            self._gradients = inputs.Gradients(core, read, found, self._wanted)
        return self._gradients(core, read, found)


class Walk:
    """The forward of calls whose tensors lie alike, as `readable` leaves them, with nothing to be made.

    Args:
        like: v as it was given, which o is like.
    """

    def __init__(self, core: DeltaRuleCore, like: Tensor, *, output_final_state: bool, keep: bool) -> None:
        shape = Shape.of(core)
        self._device = shape.device
        self._last_shape = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        self._output_final_state, self._keep = output_final_state, keep
        kernel = build.load(instances.delta_rule("forward", shape.dim_k, named_schedule(core.schedule)))
        at, addresses = number(core)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        scratch = Scratch(addresses.next())
        carried_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_v))
        transposed_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_k))
        self._matrices_size = shape.matrices_size if keep else 0
        matrices_at = addresses.next() if keep else scratch.take(shape.matrices_size * core.q.itemsize)
        matrices = shape.matrices_at(matrices_at)
        # of v's dtype because that need not be said to torch, which is half of the time
        self._scratch_size = scratch.bytes // core.v.itemsize
        self._borders_size = shape.states_size(shape.borders, shape.dim_v) if keep else None
        self._maps_size = shape.states_size(shape.carried, shape.dim_k) if keep else None
        writes_at = addresses.next(given=keep)
        borders_at = addresses.next(given=self._borders_size is not None)
        maps_at = addresses.next(given=self._maps_size is not None)
        whole, of = (shape.with_offsets(at.cu_seqlens, cut) for cut in (None, shape.split))
        gates = (gate_at(at.g, core.g), gate_at(at.beta, core.beta))
        q, k, v = (operand_at(*x) for x in ((at.q, core.q), (at.k, core.k), (at.v, core.v)))
        o = Result.like(like, "meta")
        self._is_direct = o.is_direct
        writes = operand_at(writes_at, torch.empty(core.v.shape, device="meta")) if keep else NO_OPERAND
        walk = kernel.forward(
            of, q, k, v, operand_at(o_at, o.written), writes, *gates, matrices, at.initial_state, last_at,
            carried_at, borders_at, core.scale, shape.forward_walkers, shape.makers,
        )  # fmt: skip
        before = [] if shape.makers else [kernel.matrices(whole, q, k, *gates, matrices[:2], core.scale)]
        if carried_at:
            maps = (maps_at, transposed_at)
            before += [
                kernel.maps(of, k, v, *gates, matrices[0], at.initial_state, carried_at, maps),
                kernel.carry(of, carried_at, transposed_at, borders_at),
            ]
        self._launches = Launches.of(kernel, [*before, walk])

    def __call__(self, core: DeltaRuleCore, like: Tensor) -> Outputs:
        """`forward` of these tensors."""
        v, o = core.v, torch.empty_like(like)
        written = o if self._is_direct else Result.of(o).written
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        scratch = v.new_empty(self._scratch_size) if self._scratch_size else None
        kept, at = None, starts(*core[:9], written, last, scratch)
        if self._keep:
            matrices, writes = v.new_empty(self._matrices_size), v.new_empty(v.shape)
            borders, maps = new_states(v, self._borders_size), new_states(v, self._maps_size)
            kept = Kept((writes, borders, maps, matrices))
            at += starts(matrices, writes, borders, maps)
        self._launches.run(at, current_stream(self._device))
        return o if self._is_direct else o.copy_(written), last, kept


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


class Combine:
    """The sums of the parts of dq and dk that the walks leave, of calls whose tensors lie alike.

    Args:
        given: q and k as the sums are like them. core: as `readable` leaves it.
        dq, dk: the parts.
    """

    def __init__(self, given: DeltaRuleCore, core: DeltaRuleCore, dq: Tensor, dk: Tensor) -> None:
        shape, addresses = Shape.of(core), Addresses()
        self._device = shape.device
        kernel = build.load(instances.delta_rule("backward", shape.dim_k, named_schedule(core.schedule)))
        sums = (Result.like(x, "meta").written for x in (given.q, given.k))
        operands = [operand_at(addresses.next(), x) for x in (dq, dk, *sums)]
        of_parts = shape._replace(heads=dq.shape[2], group=shape.group // shape.shared)
        self._launches = Launches.of(kernel, [kernel.combine(of_parts.with_offsets(0), *operands)])

    def __call__(self, given: DeltaRuleCore, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
        """dq and dk, like q and k as they were given."""
        sums = Result.like(given.q), Result.like(given.k)
        at = starts(dq, dk, *(x.written for x in sums))
        self._launches.run(at, current_stream(self._device))
        return sums[0].filled(), sums[1].filled()


def _sum_of_parts(parts: Tensor) -> Tensor:
    """The sum over the first dimension, always in the same order: of a lone number torch has another one."""
    if parts[0].numel() == 1:
        return torch.sum(torch.cat((parts, parts), dim=-1), dim=0)[..., :1]
    return torch.sum(parts, dim=0)


_forwards: Memo[Forward] = Memo()
_backwards: Memo[Backward] = Memo()
