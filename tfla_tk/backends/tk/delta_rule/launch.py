"""The delta rule by the ThunderKittens kernels, on the current stream; the protocol is that of `ops.linear`.

The forward has two kernels: of every chunk in parallel what depends on q, k and the gates alone, A and P, and
the walk over the chunks. A training call keeps the walk's writes U', [B, T, HV, V].

The backward makes A and P again and walks over the chunks backward in time, which gives dv and the sums of
dbeta. Two more walks over the states give the rest, `States`: forward in time dq and the part of dk from what
a token erases, backward in time dk. The gradient of g follows from their sums.

These hold up to 128 columns of V. For more, the first of the walks leaves U = beta U', too, and the gradients
of q and k are those of two plain linear attentions with a scalar decay over the same states, whose kernels
are scalar_gate's::

                  q   k   v   do  sums over j    gives
    the reads     q   k   U   do  j <= t         dq, the part of dk from what is read behind a token
    the erasures  k   k   U   dv  j < t          the parts of dk from what a token erases, and is erased of it

and a last kernel adds up these. dg is the difference of the two decays' gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.support import named_schedule, walks_states
from tfla_tk.backends.tk.operands import (
    Gate,
    Operand,
    as_operand,
    as_state,
    current_stream,
    descriptor_strides,
    multiprocessors,
)
from tfla_tk.backends.tk.scalar_gate import backward as scalar_gate
from tfla_tk.backends.tk.scalar_gate.launches import Addresses, Launch, Launches
from tfla_tk.backends.tk.scalar_gate.passes import ALIGNMENT, FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import ANCHOR_CHUNKS, CHUNK, DTYPES, Kept, MaybeTensor, chunk_slots
from tfla_tk.core.memo import Memo

Gradients: TypeAlias = tuple[MaybeTensor, ...]

_WALKER_COLUMNS = 64  # of V that a walker owns; of K in the walks for dq and dk
_SUM_COLUMNS = 16  # of V that a part of dbeta is summed over; of K for the sums of dg
# cycles of a chunk with one walker on a multiprocessor and with two, from the log of 2026-11-26
_CYCLES = {1: 1830, 2: 2770}
_NO_OPERAND: Operand = (0, 0, 0, 0)
_NO_GATE: Gate = (0, 0, 0, 0, 0)


def forward(
    core: DeltaRuleCore, *, output_final_state: bool, keep: bool
) -> tuple[Tensor, MaybeTensor, Kept | None]:
    """o [B, T, HV, V], the final state [N, HV, K, V] or None, and with `keep` the writes U'.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    like, core = core.v, _readable(core)
    key = (output_final_state, keep, like.stride(), _layout(core))
    prepared = _forwards.get(key)
    if prepared is None:
        prepared = Forward(core, like, output_final_state=output_final_state, keep=keep)
        _forwards.keep(key, prepared)
    return prepared(core, like)


def backward(
    core: DeltaRuleCore,
    kept: Kept | None,
    final_state: MaybeTensor,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_gates: bool,
) -> Gradients:
    """dq, dk, dv, dg, dbeta, None for A_log and dt_bias, dh0.

    Raises:
        BuildError: A kernel is not compiled yet and cannot be.
        RuntimeError: A launch was refused.
    """
    given = core
    core, do, dht = _readable(core), as_operand(do), as_state(dht)
    if kept is None:
        _, _, kept = forward(core, output_final_state=False, keep=True)
    assert kept is not None and kept.tensors[0] is not None
    writes = kept.tensors[0]
    key = (_layout(core), given.v.stride(), do.stride(), dht is not None)
    mirror = _mirrors.get(key)
    if mirror is None:
        mirror = Mirror(core, given.v, do, dht)
        _mirrors.keep(key, mirror)
    dv, u, dbeta_parts, dh0 = mirror(core, given.v, writes, do, dht)
    needs_dg = needs_gates and core.g is not None
    if u is None:
        through = (writes, dv.written, do, dht)
        dq, dk, dg = _walk_states(given, core, through, needs_dg=needs_dg)
    else:
        reads, erasures = _through_states(core, u, dv.written, final_state, do, dht, needs_dg=needs_dg)
        dq, dk = _combine(given, core, (reads.dq, reads.dk, erasures.dq, erasures.dk))
        dg = None
        if needs_dg:
            assert given.g is not None and reads.dg is not None and erasures.dg is not None
            dg = torch.empty_like(given.g).copy_(reads.dg - erasures.dg)
    dbeta = torch.empty_like(given.beta).copy_(torch.sum(dbeta_parts, dim=0).transpose(1, 2))
    return dq, dk, dv.filled(), dg, dbeta, None, None, dh0


class Shape(NamedTuple):
    """Sizes of a call, as the kernels take them with its cut."""

    sequences: int
    slots: int  # of chunks, per head
    batch: int
    heads: int
    seq: int
    dim_k: int
    dim_v: int
    group: int
    half: bool
    device: int
    packed_64bit: bool

    @staticmethod
    def of(core: DeltaRuleCore) -> Shape:
        """Of a call."""
        batch, seq, heads, dim_v = core.v.shape
        offsets = core.cu_seqlens
        return Shape(
            sequences=batch if offsets is None else offsets.shape[0] - 1,
            slots=chunk_slots(seq, offsets),
            batch=batch,
            heads=heads,
            seq=seq,
            dim_k=core.q.shape[3],
            dim_v=dim_v,
            group=heads // core.q.shape[2],
            half=core.q.dtype == torch.float16,
            device=core.q.get_device(),
            packed_64bit=offsets is not None and offsets.dtype == torch.int64,
        )

    def with_offsets(self, address: int) -> tuple[int, ...]:
        """With the address of the offsets, 0 for none; every sequence is one segment."""
        chunks = self.seq // CHUNK + 1
        cut = (address, self.packed_64bit, self.sequences, self.sequences, chunks)
        return (*cut, *self[2:10])

    @property
    def sum_parts(self) -> int:
        """Of the sums over K."""
        return -(-self.dim_k // _SUM_COLUMNS)

    @property
    def matrix_bytes(self) -> int:
        """Of A, and of P, of every chunk."""
        return 2 * CHUNK * CHUNK * self.batch * self.heads * self.slots

    def walkers(self, dim: int) -> int:
        """Per CTA, of walks whose walkers share a head dim: two share what they load, one alone is done
        earlier where there are few CTAs."""
        columns = -(-dim // _WALKER_COLUMNS)

        def cycles(walkers: int) -> int:
            ctas = self.sequences * self.heads * -(-columns // walkers)
            return -(-ctas // multiprocessors(self.device)) * _CYCLES[walkers]

        return 1 if columns == 1 or cycles(1) <= cycles(2) else 2


class Result(NamedTuple):
    """A result like an input, and what the kernels write: the same, or a dense tensor to be copied."""

    result: Tensor
    written: Tensor

    @staticmethod
    def like(x: Tensor, device: str | None = None) -> Result:
        """Uninitialised, like x [B, T, H, D] in memory order."""
        result = torch.empty_like(x, device=device)
        if descriptor_strides(result.shape, result.stride()) is None:
            return Result(result, result.new_empty(result.shape))
        return Result(result, result)

    def filled(self) -> Tensor:
        """The result, once what is written is there."""
        return self.result if self.written is self.result else self.result.copy_(self.written)


class Forward:
    """The forward of calls whose tensors lie alike, as `_readable` leaves them.

    Args:
        like: v as it was given, which o is like.
    """

    def __init__(self, core: DeltaRuleCore, like: Tensor, *, output_final_state: bool, keep: bool) -> None:
        self._shape = shape = Shape.of(core)
        self._last_shape = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        self._output_final_state, self._keep = output_final_state, keep
        kernel = build.load(instances.delta_rule("forward", shape.dim_k, named_schedule(core.schedule)))
        at, addresses = _number(core)
        matrices = _matrices_at(addresses.next(), shape)
        o_at, writes_at = addresses.next(), addresses.next(given=keep)
        last_at = addresses.next(given=output_final_state)
        of = shape.with_offsets(at.cu_seqlens)
        gates = (_gate(at.g, core.g), _gate(at.beta, core.beta))
        q, k, v = (_operand(*x) for x in ((at.q, core.q), (at.k, core.k), (at.v, core.v)))
        o = Result.like(like, "meta").written
        writes = _operand(writes_at, torch.empty(core.v.shape, device="meta")) if keep else _NO_OPERAND
        self._launches = Launches.of(
            kernel,
            [
                kernel.matrices(of, q, k, *gates, matrices, core.scale),
                kernel.forward(
                    of, q, k, v, _operand(o_at, o), writes, *gates, matrices, at.initial_state, last_at,
                    core.scale, shape.walkers(shape.dim_v),
                ),
            ],
        )  # fmt: skip

    def __call__(self, core: DeltaRuleCore, like: Tensor) -> tuple[Tensor, MaybeTensor, Kept | None]:
        """`forward` of these tensors."""
        v, o = core.v, Result.like(like)
        matrices = v.new_empty(self._shape.matrix_bytes)  # two matrices of 16-bit numbers
        writes = v.new_empty(v.shape) if self._keep else None
        last = v.new_empty(self._last_shape, dtype=torch.float32) if self._output_final_state else None
        self._launches.run(
            _starts(*core[:9], matrices, o.written, writes, last),
            current_stream(self._shape.device),
        )
        return o.filled(), last, None if writes is None else Kept((writes,))


class Mirror:
    """The backward's walk of calls whose tensors lie alike, as `_readable` leaves them.

    Args:
        like: v as it was given, which dv is like.
    """

    def __init__(self, core: DeltaRuleCore, like: Tensor, do: Tensor, dht: MaybeTensor) -> None:
        self._shape = shape = Shape.of(core)
        parts = -(-shape.dim_v // _SUM_COLUMNS)
        self._sums_shape = (parts, shape.batch, shape.heads, shape.seq)
        kernel = build.load(instances.delta_rule("backward", shape.dim_k, named_schedule(core.schedule)))
        at, addresses = _number(core)
        matrices = _matrices_at(addresses.next(), shape)
        do_at, writes_at, dv_at = (addresses.next() for _ in range(3))
        self._keeps_u = not walks_states(shape.dim_v)
        u_at, sums_at = addresses.next(given=self._keeps_u), addresses.next()
        dht_at = addresses.next(given=dht is not None)
        dh0_at = addresses.next(given=core.initial_state is not None)
        of = shape.with_offsets(at.cu_seqlens)
        gates = (_gate(at.g, core.g), _gate(at.beta, core.beta))
        q, k = _operand(at.q, core.q), _operand(at.k, core.k)
        dense = torch.empty(core.v.shape, device="meta")
        u = _operand(u_at, dense) if self._keeps_u else _NO_OPERAND
        self._launches = Launches.of(
            kernel,
            [
                kernel.matrices(of, q, k, *gates, matrices, core.scale),
                kernel.mirror(
                    of, q, k, _operand(do_at, do), _operand(writes_at, dense),
                    _operand(dv_at, Result.like(like, "meta").written), u, *gates,
                    matrices, sums_at, dht_at, dh0_at, core.scale, shape.walkers(shape.dim_v),
                ),
            ],
        )  # fmt: skip

    def __call__(
        self, core: DeltaRuleCore, like: Tensor, writes: Tensor, do: Tensor, dht: MaybeTensor
    ) -> tuple[Result, MaybeTensor, Tensor, MaybeTensor]:
        """dv, U for scalar_gate's walks, the parts of dbeta [parts, B, HV, T] and dh0."""
        v, initial = core.v, core.initial_state
        matrices = v.new_empty(self._shape.matrix_bytes)
        dv, u = Result.like(like), v.new_empty(v.shape) if self._keeps_u else None
        sums = v.new_empty(self._sums_shape, dtype=torch.float32)
        dh0 = None if initial is None else torch.empty_like(initial)
        self._launches.run(
            _starts(*core[:9], matrices, do, writes, dv.written, u, sums, dht, dh0),
            current_stream(self._shape.device),
        )
        return dv, u, sums, dh0


# U', dv, do, dht
ThroughStates: TypeAlias = tuple[Tensor, Tensor, Tensor, MaybeTensor]


class Sums(NamedTuple):
    """What the walks leave for dg, fp32: bytes from the start of their allocation, or addresses.

    Attributes:
        workspace: of the gates' kernels.
        anchors, flows: the states at the anchors and the flows of gradient over these.
        whole, inter: of every token and of every chunk, of the walk forward in time and of the other one.
        bytes: of all; no address.
    """

    workspace: int
    anchors: int
    flows: int
    whole: tuple[int, int]
    inter: tuple[int, int]
    bytes: int

    @staticmethod
    def of(shape: Shape, anchor_bytes: int, workspace_bytes: int) -> Sums:
        """The offsets."""
        parts, heads = shape.sum_parts, shape.batch * shape.heads
        flows = heads * (shape.slots // ANCHOR_CHUNKS + 1) * parts * FLOAT
        whole, inter = parts * heads * shape.seq * FLOAT, parts * heads * shape.slots * 2 * FLOAT
        sizes = (workspace_bytes, anchor_bytes, flows, whole, whole, inter, inter)
        at = [0]
        for size in sizes:
            at.append(at[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return Sums(at[0], at[1], at[2], (at[3], at[4]), (at[5], at[6]), at[7])

    def at(self, address: int) -> Sums:
        """The addresses in an allocation."""
        whole, inter = ((x + address, y + address) for x, y in (self.whole, self.inter))
        return Sums(self.workspace + address, self.anchors + address, self.flows + address, whole, inter, 0)

    def of_walk(self, number: int) -> tuple[int, int, int, int]:
        """As a walk takes them."""
        return self.whole[number], self.inter[number], self.anchors, self.flows


class States:
    """The walks for dq and dk, and dg from their sums, of calls whose tensors lie alike.

    Args:
        given: q, k and g as the results are like them.
        core: as `_readable` leaves it.
    """

    def __init__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, through: ThroughStates, *, needs_dg: bool
    ) -> None:
        writes, dv, do, dht = through
        self._shape = shape = Shape.of(core)
        self._needs_dg = needs_dg
        self._per_head = (*core.v.shape[:3], shape.dim_k)
        self._state = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        kernel = build.load(instances.delta_states(shape.dim_v))
        at, addresses = _number(core)
        writes_at, dv_at, do_at, dht_at = (addresses.next(given=x is not None) for x in through)
        dq_at, dk_at, left_at = (addresses.next() for _ in range(3))
        sums_at, dg_at = (addresses.next(given=needs_dg) for _ in range(2))
        self._leaves = (needs_dg and dht is not None, needs_dg and core.initial_state is not None)
        last_at, dh0_at = (addresses.next(given=given) for given in self._leaves)
        of, walkers = shape.with_offsets(at.cu_seqlens), shape.walkers(shape.dim_k)
        dq, dk = (
            _operand(x_at, x) for x_at, x in zip((dq_at, dk_at), self._written(given, "meta"), strict=True)
        )
        left = _operand(left_at, torch.empty(self._per_head, device="meta"))
        operands = (
            *(_operand(at.q, core.q), _operand(at.k, core.k)),
            *(_operand(writes_at, writes), _operand(do_at, do), _operand(dv_at, dv)),
            *(dq, left, dk, _gate(at.g, core.g), _gate(at.beta, core.beta)),
        )
        walks = ((kernel.left, at.initial_state, last_at), (kernel.right, dht_at, dh0_at))
        sums, of_walks, self._sums_size = None, [(0, 0, 0, 0)] * 2, 0
        if needs_dg:
            around = build.load(instances.for_scalar_decay(instances.mlstm_bwd()))
            workspace_bytes = around.mlstm_bwd_gates_workspace_bytes(shape.heads, shape.sequences)
            offsets = Sums.of(shape, kernel.anchor_bytes(shape.with_offsets(0)), workspace_bytes)
            self._sums_size = offsets.bytes // FLOAT
            sums = offsets.at(sums_at)
            of_walks = [sums.of_walk(number) for number in range(2)]
        launches: list[Launch] = [
            walk(of, *operands, entering, leaving, of_walk, core.scale, walkers)
            for (walk, entering, leaving), of_walk in zip(walks, of_walks, strict=True)
        ]
        if sums is not None:
            assert given.g is not None and core.g is not None
            launches.append(
                around.mlstm_bwd_gates(
                    (sums.whole[0], sums.inter[0], shape.sum_parts),
                    (sums.whole[1], sums.inter[1], shape.sum_parts),
                    (sums.flows, shape.sum_parts),
                    _NO_GATE, _gate(at.g, core.g), _NO_GATE,
                    _gate(dg_at, torch.empty_like(given.g, device="meta")),
                    0, (at.initial_state, dh0_at, 0, 0), (last_at, dht_at, 0, 0), sums.workspace, of[:3],
                    (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
                )
            )  # fmt: skip
        self._launches = Launches.of(kernel, launches)

    def __call__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, through: ThroughStates
    ) -> tuple[Tensor, Tensor, MaybeTensor]:
        """dq and dk of every head of v, as they are written, and dg."""
        dq, dk = self._written(given)
        left = core.q.new_empty(self._per_head)
        sums = dg = None
        if self._needs_dg:
            assert given.g is not None
            sums = core.q.new_empty(self._sums_size, dtype=torch.float32)
            dg = torch.empty_like(given.g)
        # those that the sums are of: the forward's and the mirror's are rounded otherwise
        last, dh0 = (core.q.new_empty(self._state, dtype=torch.float32) if x else None for x in self._leaves)
        self._launches.run(
            _starts(*core[:9], *through, dq, dk, left, sums, dg, last, dh0),
            current_stream(self._shape.device),
        )
        return dq, dk, dg

    def _written(self, given: DeltaRuleCore, device: str | None = None) -> tuple[Tensor, Tensor]:
        """What the walks write of dq and dk: the results, or those of every head of v."""
        if self._shape.group == 1:
            return Result.like(given.q, device).written, Result.like(given.k, device).written
        of_heads = functools.partial(given.q.new_empty, self._per_head, device=device)
        return of_heads(), of_heads()


def _walk_states(
    given: DeltaRuleCore, core: DeltaRuleCore, through: ThroughStates, *, needs_dg: bool
) -> tuple[Tensor, Tensor, MaybeTensor]:
    """dq, dk and dg."""
    strides = (given.q.stride(), given.k.stride(), *(None if x is None else x.stride() for x in through))
    key = (_layout(core), strides, needs_dg)
    states = _states.get(key)
    if states is None:
        states = States(given, core, through, needs_dg=needs_dg)
        _states.keep(key, states)
    dq, dk, dg = states(given, core, through)
    if dq.shape != given.q.shape:
        return (*_combine(given, core, (dq, dk, None, None)), dg)
    return _like(given.q, dq), _like(given.k, dk), dg


def _like(x: Tensor, written: Tensor) -> Tensor:
    """What was written as it lies like x."""
    result = Result.like(x, "meta")
    return written if result.written is result.result else torch.empty_like(x).copy_(written)


class Through(NamedTuple):
    """What scalar_gate's walks give of one of the two linear attentions: per head of v."""

    dq: Tensor
    dk: Tensor
    dg: MaybeTensor


def _through_states(
    core: DeltaRuleCore,
    u: Tensor,
    dv: Tensor,
    final_state: MaybeTensor,
    do: Tensor,
    dht: MaybeTensor,
    *,
    needs_dg: bool,
) -> tuple[Through, Through]:
    """The reads and the erasures."""
    initial, offsets = core.initial_state, core.cu_seqlens
    g = core.g
    if g is None:
        g = core.v.new_zeros((), dtype=torch.float32)
    elif needs_dg:
        g = g.float()
    # the flow of gradient over a sequence's start follows from the state's gradient there
    needs_dv = needs_dg and initial is not None

    def run(
        q: Tensor, given: Tensor, scale: float, last: MaybeTensor, d_last: MaybeTensor, strict: bool
    ) -> Through:
        tensors = (q, core.k, u, None, g, initial, None, offsets, given, None, None, None, last, None, given)
        dq, dk, _, _, dg, *_ = scalar_gate.run(
            (*tensors, d_last, None), _options(scale, needs_dg, needs_dv, strict)
        )
        return Through(dq, dk, dg)

    return (
        run(core.q, do, core.scale, final_state if needs_dg else None, dht, False),
        run(core.k, dv, 1.0, None, None, True),
    )


@functools.lru_cache(maxsize=1024)
def _options(scale: float, needs_dg: bool, needs_dv: bool, strict: bool) -> scalar_gate.Options:
    return scalar_gate.Options(
        sigmoid_gate=True,
        normalize=False,
        eps=1.0,
        scale=scale,
        needs_df=needs_dg,
        decay=True,
        heads_last=True,
        strict=strict,
        needs_dv=needs_dv,
    )


def _combine(
    given: DeltaRuleCore, core: DeltaRuleCore, parts: tuple[Tensor, Tensor, MaybeTensor, MaybeTensor]
) -> tuple[Tensor, Tensor]:
    """dq and dk, like q and k as they were given.

    Args:
        parts: of every head of v, dq, and dk or its part from what is read behind a token and what is to be
            taken away from it.
    """
    dq, dk = Result.like(given.q), Result.like(given.k)
    operands = (*parts, dq.written, dk.written)
    key = (_layout(core), *(None if x is None else x.stride() for x in operands))
    launches = _combines.get(key)
    if launches is None:
        shape = Shape.of(core)
        kernel = build.load(instances.delta_rule("backward", shape.dim_k, named_schedule(core.schedule)))
        addresses = Addresses()
        prepared = (
            _operand(address, x) if x is not None else _NO_OPERAND
            for x, address in ((x, addresses.next(given=x is not None)) for x in operands)
        )
        launches = Launches.of(kernel, [kernel.combine(shape.with_offsets(0), *prepared)])
        _combines.keep(key, launches)
    launches.run(_starts(*operands), current_stream(core.q.get_device()))
    return dq.filled(), dk.filled()


def _readable(core: DeltaRuleCore) -> DeltaRuleCore:
    """The tensors as they lie where the kernels can take them so, else copies."""
    offsets = core.cu_seqlens
    found = DeltaRuleCore(
        as_operand(core.q),
        as_operand(core.k),
        as_operand(core.v),
        core.g,
        core.beta,
        None,
        None,
        as_state(core.initial_state),
        None if offsets is None else offsets.contiguous(),
        *core[9:],
    )
    return found


def _layout(core: DeltaRuleCore) -> Any:
    """All that the launches of a call depend on but for addresses."""
    q, k, v, g, beta, _, _, initial_state, cu_seqlens = core[:9]
    return (
        q.get_device(),
        q.dtype,
        q.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        None if g is None else (g.stride(), g.dtype),
        beta.stride(),
        beta.dtype,
        initial_state is not None,
        None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype),
        core.scale,
        core.schedule,
    )


def _number(core: DeltaRuleCore) -> tuple[Any, Addresses]:
    """The prepared addresses of a call's tensors in the place of these, and what numbers further ones."""
    addresses = Addresses()
    at = [addresses.next(given=x is not None) for x in core[:9]]
    return DeltaRuleCore._make([*at, *core[9:]]), addresses


def _starts(*tensors: MaybeTensor) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _matrices_at(address: int, shape: Shape) -> tuple[int, int]:
    """A and P in one allocation."""
    return address, address + shape.matrix_bytes


def _operand(address: int, x: Tensor) -> Operand:
    """x [B, T, H, D]."""
    strides = descriptor_strides(x.shape, x.stride())
    assert strides is not None
    batch, row, head = strides
    return address, batch, head, row


def _gate(address: int, x: MaybeTensor) -> Gate:
    """x [B, T, HV]."""
    return _NO_GATE if x is None else (address, *x.transpose(1, 2).stride(), DTYPES[x.dtype])


_forwards: Memo[Forward] = Memo()
_mirrors: Memo[Mirror] = Memo()
_combines: Memo[Launches] = Memo()
_states: Memo[States] = Memo()
