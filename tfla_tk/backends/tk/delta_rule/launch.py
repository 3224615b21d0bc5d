"""The delta rule by the ThunderKittens kernels, on the current stream; the protocol is that of `ops.linear`.

The forward has two kernels: the matrices A and P of every chunk in parallel, which depend on q, k and the
gates alone, and the walk over the chunks. Some walks make P themselves. Where the walk leaves multiprocessors
idle, one launch has both: makers of the matrices run beside the walk. Where memory bounds the speed, the walk
makes both matrices itself. A training call keeps A, the walk's writes, [B, T, HV, V], and the state that
enters each chunk (docs/delta-rule-backward.md, "What the backward is given").

Few long sequences are split: three launches before the walk give the states with which its segments begin.
Over a segment the state is mapped S -> M S + own. Of a head that forgets soon this is not asked for: walks
begin some chunks before their segments, as many as the first of these launches says. A training call keeps
these numbers and M for its backward, whose walk is split in the same way.

The backward walks over the chunks backward in time, with the same matrices, and makes dq, dk and dv at once
(`one_walk`). Heads of v that share a head of q and k leave parts of dq and dk, which a last kernel adds up.
With K of more than 128 it takes three walks instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.backends.tk.delta_rule import inputs
from tfla_tk.backends.tk.delta_rule import support as kernels
from tfla_tk.backends.tk.delta_rule.call import WARP_COLUMNS, Left, Places, Shape, layout
from tfla_tk.backends.tk.delta_rule.inputs import Inputs, Wanted
from tfla_tk.backends.tk.prepared import ADDRESS_ALIGNMENT, FLOAT, Scratch, current_stream, operand_at, starts
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import (
    DELTA_ANCHOR_CHUNKS,
    DELTA_DECAY_CHUNKS,
    DELTA_KEYS_WARPS,
    GATE_KINDS,
    Kept,
    MaybeTensor,
    dense_like,
)
from tfla_tk.core.memo import Memo


def forward(core: DeltaRuleCore, *, output_final_state: bool, keep: bool) -> prepared.Outputs:
    """o [B, T, HV, V], the final state [N, HV, K, V] or None, and with `keep` one allocation of what the
    backward reads (`Left`)."""
    read = prepared.readable(core)
    options = {"output_final_state": output_final_state, "keep": keep}
    key = output_final_state, keep, layout(core, read)
    return _forwards.of(key, lambda: Forward(core, read, **options))(core, read)


def prepare(core: DeltaRuleCore, *, output_final_state: bool, keep: bool) -> Callable[..., prepared.Outputs]:
    options = core[9:]

    def run_any(*tensors: Any) -> prepared.Outputs:
        given = DeltaRuleCore._make((*tensors, *options))
        return forward(given, output_final_state=output_final_state, keep=keep)

    if prepared.readable(core) is not core:
        return run_any
    is_raw = any(Wanted.of(core))
    # raw inputs are made into what the walk reads by the first call
    walk = None if is_raw else Walk(core, output_final_state=output_final_state, keep=keep)
    of_raw = Forward(core, core, output_final_state=output_final_state, keep=keep) if is_raw else None

    def run(*tensors: Any) -> prepared.Outputs:
        at = starts(*tensors)
        if (at[0] | at[1] | at[2] | at[7]) % ADDRESS_ALIGNMENT:
            return run_any(*tensors)
        if walk is not None:
            return walk(tensors[2], at)
        assert of_raw is not None
        given = DeltaRuleCore._make((*tensors, *options))
        return of_raw(given, given)

    return run


def kept_layout(core: DeltaRuleCore) -> tuple[int, ...]:
    """What says how things lie in what the forward of a call leaves with `keep`, beside the call itself: its
    elements of v's dtype, and the chunks of a segment where sequences are split, else 0."""
    shape, of_backward = Shape.of(core, trains=True), Scratch(0)
    Left.of(shape, of_backward)
    return _layout_of(shape, of_backward, core.v.itemsize)


def _layout_of(shape: Shape, of_backward: Scratch, itemsize: int) -> tuple[int, ...]:
    """`kept_layout` of a shape, and what `Left` has taken of it."""
    return of_backward.bytes // itemsize, shape.split.chunks if shape.split else 0


def backward(
    core: DeltaRuleCore, kept: Kept | None, do: Tensor, dht: MaybeTensor, *, needs_gates: bool
) -> prepared.Gradients:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0. What was kept with another layout than `kept_layout`
    is made again."""
    return _run(needs_gates, core, core, kept, do, dht)


def _run(
    needs_gates: bool,
    given: DeltaRuleCore,
    core: DeltaRuleCore,
    kept: Kept | None,
    do: Tensor,
    dht: MaybeTensor,
) -> prepared.Gradients:
    """`backward`, where the tensors of core may be copies of those given, which gradients are like."""
    key = needs_gates, prepared.strides(do, dht), layout(given, core)
    run = _backwards.get(key)
    if run is None:
        read, dout, last = prepared.readable(core), prepared.as_operand(do), prepared.as_state(dht)
        if read is not core or dout is not do or last is not dht:
            # not kept: a key does not tell addresses, and tensors like these may need no copy
            return _run(needs_gates, given, read, kept, dout, last)
        run = Backward(given, core, needs_gates=needs_gates)
        _backwards.keep(key, run)
    return run(given, core, kept, do, dht)


class Forward:
    """The forward of calls whose tensors lie alike. read: the call as `readable` leaves it."""

    def __init__(
        self, core: DeltaRuleCore, read: DeltaRuleCore, *, output_final_state: bool, keep: bool
    ) -> None:
        wanted = Wanted.of(core)
        self._inputs = Inputs(core, read, wanted) if any(wanted) else None
        self._walk: Walk | None = None  # of what the inputs are made into, which the first call has
        self._output_final_state, self._keep = output_final_state, keep

    def __call__(self, core: DeltaRuleCore, read: DeltaRuleCore) -> prepared.Outputs:
        made = read if self._inputs is None else self._inputs(core, read)
        if self._walk is None:
            self._walk = Walk(made, output_final_state=self._output_final_state, keep=self._keep)
        return self._walk(made.v, starts(*made[:9]))


class Backward:
    """The backward of calls whose tensors and gradients lie alike. What follows raw inputs is prepared by
    the first call, which has what these are made into. core: the call as gradients are like it. read: as
    `readable` leaves it but for odd addresses."""

    def __init__(self, core: DeltaRuleCore, read: DeltaRuleCore, *, needs_gates: bool) -> None:
        wanted = Wanted.of(core)
        self._needs_gates = needs_gates
        self._inputs = Inputs(core, read, wanted) if any(wanted) else None
        self._wanted = wanted._replace(decay=wanted.decay and needs_gates)  # gradients
        self._needs_dg = needs_gates and core.g is not None
        self._kept_layout = kept_layout(read)
        self._walks: Walks | None = None
        self._gradients: inputs.Gradients | None = None

    def __call__(
        self, core: DeltaRuleCore, read: DeltaRuleCore, kept: Kept | None, do: Tensor, dht: MaybeTensor
    ) -> prepared.Gradients:
        at = starts(*read[:9], do, dht)
        if (at[0] | at[1] | at[2] | at[7] | at[9] | at[10]) % ADDRESS_ALIGNMENT:
            copies = prepared.readable(read), kept, prepared.as_operand(do), prepared.as_state(dht)
            return _run(self._needs_gates, core, *copies)
        given, made = core, read
        if self._inputs is not None:
            made = self._inputs(core, read)
            given = made if read is core else self._inputs.given(core, made)
            at[:9] = starts(*made[:9])
        left = prepared.left_for(
            kept, self._kept_layout, lambda: forward(made, output_final_state=False, keep=True)[2]
        )
        if self._walks is None:
            self._walks = Walks(given, made, do, dht, needs_dg=self._needs_dg)
        at += starts(left)
        found = self._walks(given, made, at)
        if not any(self._wanted):
            return found
        if self._gradients is None:
            self._gradients = inputs.Gradients(core, read, found, self._wanted)
        return self._gradients(core, read, found)


class Walk:
    """The forward of calls whose tensors lie alike, as `readable` leaves them, with nothing to be made."""

    def __init__(self, core: DeltaRuleCore, *, output_final_state: bool, keep: bool) -> None:
        shape = Shape.of(core, trains=keep)
        self._device = shape.device
        self._last_shape = shape.state_shape
        self._output_final_state = output_final_state
        kernel = build.load(instances.DELTA_RULE, *kernels.of_forward(shape))
        at, addresses = prepared.number(core)
        o_at, last_at = addresses.next(), addresses.next(given=output_final_state)
        scratch, of_backward = Scratch(addresses.next()), Scratch(addresses.next())
        carried_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_v))
        transposed_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_k))
        # what a split is told of every chunk, eight numbers
        bounds_at = scratch.take(8 * FLOAT * shape.batch * shape.heads * shape.slots if shape.split else 0)
        makes_matrices = shape.walk_makes_matrices
        if keep:
            left = Left.of(shape, of_backward)
        else:
            kept = 0 if makes_matrices else shape.kept_matrices * shape.matrix_bytes
            left = Left(scratch.take(kept), leads=scratch.take(shape.leads_bytes))
        matrices = shape.matrices_at(left.matrices, scratch.take(shape.other_matrices_bytes))
        # of v's dtype because that need not be said to torch, which is half of the time
        self._scratch_size = scratch.bytes // core.v.itemsize
        self._kept_layout = _layout_of(shape, of_backward, core.v.itemsize) if keep else None
        whole, of = (shape.with_offsets(at.cu_seqlens, cut) for cut in (None, shape.split))
        gates = (prepared.gate_at(at.g, core.g), prepared.gate_at(at.beta, core.beta))
        q, k, v = (operand_at(*x) for x in ((at.q, core.q), (at.k, core.k), (at.v, core.v)))
        dense = torch.empty(core.v.shape, device="meta")
        writes = operand_at(left.writes, dense) if keep else prepared.NO_OPERAND
        walk = kernel.forward(
            of, q, k, v, operand_at(o_at, dense), writes, *gates, matrices, at.initial_state, last_at,
            carried_at, left.leads, left.borders, left.states, core.scale, shape.forward_walkers,
            shape.makers, makes_matrices,
        )  # fmt: skip
        before: list[prepared.Launch] = []
        if not shape.makers and not makes_matrices:
            before.append(kernel.matrices(whole, q, k, *gates, matrices[:2], core.scale, bounds_at))
        if carried_at:
            maps = (left.maps, transposed_at)
            before += [
                kernel.leads(of, bounds_at, left.leads, shape.longest_lead, keep),
                kernel.maps(of, k, v, *gates, matrices[0], at.initial_state, carried_at, left.leads, maps),
                kernel.carry(of, carried_at, left.leads, transposed_at, False),
            ]
        self._run = build.launches([*before, walk])

    def __call__(self, v: Tensor, at: list[int]) -> prepared.Outputs:
        """`forward` of the tensors of a call, which begin at `at`."""
        o = dense_like(v)
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        scratch = v.new_empty(self._scratch_size) if self._scratch_size else None
        left = v.new_empty(self._kept_layout[0]) if self._kept_layout else None
        at += starts(o, last, scratch, left)
        self._run(at, current_stream(self._device))
        kept = None if left is None else Kept((left,), self._kept_layout)
        return o, last, kept


class Walks:
    """The walks of the backward, and what follows from their sums, of calls whose tensors lie alike.
    given: the call as the gradients are like it. core: as `readable` leaves it, with nothing to be made."""

    def __init__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, do: Tensor, dht: MaybeTensor, *, needs_dg: bool
    ) -> None:
        shape = Shape.of(core, trains=True)
        self._device, self._needs_dg = shape.device, needs_dg
        g = given.g if needs_dg else None
        kernel = build.load(instances.DELTA_RULE, *kernels.of_backward(shape, needs_dg=g is not None))
        at, addresses = prepared.number(core)
        do_at, dht_at = addresses.next(), addresses.next(given=dht is not None)
        left = Left.of(shape, Scratch(addresses.next()))
        self._results = prepared.Results(given[:3], addresses)
        dq, dk, dv = self._results.operands
        dg_at, dbeta_at = addresses.next(given=needs_dg), addresses.next()
        dh0_at = addresses.next(given=core.initial_state is not None)
        scratch = Scratch(addresses.next())
        parts = -(-shape.dim_v // WARP_COLUMNS)  # of the sums over V that are left for dbeta
        parts_at = scratch.take(parts * shape.batch * shape.heads * shape.seq * FLOAT)
        of_walks, combining = [dq, dk], []
        if shape.combines:
            itemsize = FLOAT if shape.sums_floats else core.q.itemsize
            of_walks = [scratch.take_dense(shape.partial, itemsize) for _ in range(2)]
            of_parts = shape.of_parts.with_offsets(0)
            combining = [kernel.combine(of_parts, *of_walks, dq, dk, shape.sums_floats)]
        places = Places(
            q=operand_at(at.q, core.q),
            k=operand_at(at.k, core.k),
            gates=(prepared.gate_at(at.g, core.g), prepared.gate_at(at.beta, core.beta)),
            writes=operand_at(left.writes, torch.empty(core.v.shape, device="meta")),
            do=operand_at(do_at, do),
            dht=dht_at,
            dq=of_walks[0],
            dk=of_walks[1],
            combining=combining,
            dv=dv,
            dg=None if g is None else prepared.gate_at(dg_at, torch.empty_like(g, device="meta")),
            dh0=dh0_at,
            strengths=parts_at,
        )
        walks = three_walks if shape.is_wide else one_walk
        launches = walks(kernel, shape, core, at, left, places, scratch)
        dbeta = prepared.gate_at(dbeta_at, torch.empty_like(given.beta, device="meta"))
        launches.append(kernel.strength(shape.with_offsets(0), parts_at, parts, dbeta))
        self._scratch_size = scratch.bytes // core.v.itemsize
        self._run = build.launches(launches)

    def __call__(self, given: DeltaRuleCore, core: DeltaRuleCore, at: list[int]) -> prepared.Gradients:
        """The gradients of a call whose tensors, do, dht and what the forward has kept begin at `at`."""
        results, written = self._results.allocate(given[:3])
        dg = torch.empty_like(given.g) if self._needs_dg and given.g is not None else None
        dbeta = torch.empty_like(given.beta)
        initial = given.initial_state
        dh0 = None if initial is None else torch.empty_like(initial)
        dh0_written = prepared.writable_state(dh0)
        scratch = core.v.new_empty(self._scratch_size)
        at += starts(*written, dg, dbeta, dh0_written, scratch)
        self._run(at, current_stream(self._device))
        prepared.Results.fill(results, written)
        return *results, dg, dbeta, None, None, prepared.filled(dh0, dh0_written)


def one_walk(
    kernel: Any, shape: Shape, core: DeltaRuleCore, at: Any, left: Left, places: Places, scratch: Scratch
) -> list[prepared.Launch]:
    """The launches that carry gradients of states over a split, the walk, what makes dq and dk of parts of
    heads or of sums in fp32, and dg. at: the prepared addresses of core's tensors. left: what the forward has
    kept. scratch: gets places of what launches leave for each other."""
    of = shape.with_offsets(at.cu_seqlens, shape.split)
    q, k, gates, writes, *_ = places
    carried_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_v))
    leads = left.leads + shape.leads_bytes if carried_at else 0  # behind the segments
    launches: list[prepared.Launch] = []
    if carried_at:
        launches += [
            kernel.mirror(
                of, q, k, places.do, *[prepared.NO_OPERAND] * 2, *gates, (left.matrices, 0), 0, places.dht, 0,
                carried_at, leads, 0, core.scale, shape.mirror_walkers,
            ),
            kernel.carry(of, carried_at, leads, left.maps, True),
        ]  # fmt: skip
    heads = shape.batch * shape.heads
    turns = scratch.take((1 + heads * shape.slots) * torch.int32.itemsize) if shape.sums_floats else 0
    token_sums = flows = 0
    if places.dg is not None:
        token_sums = scratch.take(3 * shape.value_slices * heads * shape.seq * FLOAT)
        flows = scratch.take(DELTA_KEYS_WARPS * shape.value_slices * heads * shape.slots * FLOAT)
    launches.append(
        kernel.gradients(
            of, q, k, places.do, writes, places.dq, places.dk, turns, places.dv, *gates, left.matrices,
            left.states, places.dht, places.dh0, carried_at, leads, places.strengths, token_sums, flows,
            core.scale,
        )
    )  # fmt: skip
    launches += places.combining
    if places.dg is not None:
        of_chunks = shape.with_offsets(at.cu_seqlens, shape.cut_into(DELTA_DECAY_CHUNKS))
        launches.append(kernel.decay(of_chunks, shape.slots, gates[0], places.dg, token_sums, flows))
    return launches


def three_walks(
    kernel: Any, shape: Shape, core: DeltaRuleCore, at: Any, left: Left, places: Places, scratch: Scratch
) -> list[prepared.Launch]:
    """The mirror, the walks for dq and dk, what adds up their parts, and dg."""
    of = shape.with_offsets(at.cu_seqlens, shape.cut)
    q, k, gates, writes, *_ = places
    d_borders = scratch.take(shape.states_bytes(shape.borders, shape.dim_v))
    mirror = kernel.mirror(
        shape.with_offsets(at.cu_seqlens), q, k, places.do, writes, places.dv, *gates,
        shape.matrices_at(left.matrices, 0)[:2], places.strengths, places.dht, places.dh0,
        0, 0, d_borders, core.scale, shape.mirror_walkers,
    )  # fmt: skip
    part_of_dk = scratch.take_dense(shape.partial, core.q.itemsize)
    written_at = scratch.take(kernel.written_bytes(of, shape.shared))
    low_at = scratch.take(kernel.low_bytes(of, shape.shared))
    operands = q, k, writes, places.do, places.dv, places.dq, part_of_dk, places.dk, *gates
    dg = places.dg
    workspace = anchors = flows = flow_bytes = last_at = dh0_at = 0
    # sums of every token and of every chunk, of the walk forward in time and of the other
    whole = inter = [0, 0]
    if dg is not None:
        parts = shape.batch * shape.heads * shape.sum_parts  # of each walk
        workspace = scratch.take(kernel.mlstm_bwd_gates_workspace_bytes(shape.heads, shape.sequences))
        anchors = scratch.take(kernel.anchor_bytes(of))  # the states there
        # of gradient over these, for the chunks behind an anchor; then as many for those before it
        flow_bytes = parts * (shape.slots // DELTA_ANCHOR_CHUNKS + 1) * FLOAT
        flows = scratch.take(2 * flow_bytes)
        whole = [scratch.take(parts * shape.seq * FLOAT) for _ in range(2)]
        inter = [scratch.take(parts * shape.slots * 2 * FLOAT) for _ in range(2)]
        # those that the sums are of: the forward's and the mirror's are rounded otherwise
        state_bytes = shape.states_bytes(shape.sequences, shape.dim_v)
        last_at = scratch.take(state_bytes) if places.dht else 0
        dh0_at = scratch.take(state_bytes) if at.initial_state else 0
    of_left, of_right = ((*of_walk, anchors, flows) for of_walk in zip(whole, inter, strict=True))
    options = written_at, low_at, core.scale, shape.shared
    launches = [
        mirror,
        kernel.left(of, *operands, at.initial_state, last_at, left.borders, of_left, *options),
        kernel.right(of, *operands, places.dht, dh0_at, d_borders, of_right, *options),
    ]
    if dg is not None:
        launches.append(
            kernel.mlstm_bwd_gates(
                (whole[0], inter[0], shape.sum_parts),
                (whole[1], inter[1], shape.sum_parts),
                (flows, flows + flow_bytes, shape.sum_parts, DELTA_ANCHOR_CHUNKS),
                prepared.NO_GATE, gates[0], prepared.NO_GATE, dg,
                0, (at.initial_state, dh0_at, 0, 0), (last_at, places.dht, 0, 0), workspace, of[:3],
                (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v),
                GATE_KINDS["decay"], shape.device,
            )
        )  # fmt: skip
    return launches + places.combining


_forwards: Memo[Forward] = Memo()
_backwards: Memo[Backward] = Memo()
