"""The walks of the delta rule's backward over the states, for dq and dk, and dg from their sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.call import NO_GATE, Shape, gate_at, number
from tfla_tk.backends.tk.operands import current_stream
from tfla_tk.backends.tk.prepared import Launch, Launches, Result, operand_at, starts
from tfla_tk.backends.tk.scalar_gate.walks import ALIGNMENT, FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import ANCHOR_CHUNKS, MaybeTensor


class Through(NamedTuple):
    """What the walks read besides the call's own tensors.

    Attributes:
        writes, dv, do: the writes that the forward has kept, and the gradients.
        dht: that of the final state.
        borders, d_borders: the states and their gradients at the borders between segments, None where every
            sequence is one segment.
    """

    writes: Tensor
    dv: Tensor
    do: Tensor
    dht: MaybeTensor
    borders: MaybeTensor
    d_borders: MaybeTensor


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
        core: as `readable` leaves it.
    """

    def __init__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, through: Through, *, needs_dg: bool
    ) -> None:
        self._shape = shape = Shape.of(core)
        self._needs_dg = needs_dg
        self._partial = (shape.batch, shape.seq, shape.heads // shape.shared, shape.dim_k)
        self._state = (shape.sequences, shape.heads, shape.dim_k, shape.dim_v)
        kernel = build.load(instances.delta_states(shape.dim_v))
        at, addresses = number(core)
        of_through = [addresses.next(given=x is not None) for x in through]
        writes_at, dv_at, do_at, dht_at, borders_at, d_borders_at = of_through
        dq_at, dk_at, left_at = (addresses.next() for _ in range(3))
        sums_at, dg_at = (addresses.next(given=needs_dg) for _ in range(2))
        written_at = addresses.next(given=shape.states_slices * shape.shared > 1)
        self._leaves = (needs_dg and through.dht is not None, needs_dg and core.initial_state is not None)
        last_at, dh0_at = (addresses.next(given=given) for given in self._leaves)
        of = shape.with_offsets(at.cu_seqlens, shape.cut)
        self._written_size = kernel.written_bytes(of, shape.shared) // _INT if written_at else 0
        dq, dk = (
            operand_at(x_at, x.written)
            for x_at, x in zip((dq_at, dk_at), self._results(given, "meta"), strict=True)
        )
        left = operand_at(left_at, torch.empty(self._partial, device="meta"))
        operands = (
            *(operand_at(at.q, core.q), operand_at(at.k, core.k)),
            *(operand_at(writes_at, through.writes), operand_at(do_at, through.do)),
            operand_at(dv_at, through.dv),
            *(dq, left, dk, gate_at(at.g, core.g), gate_at(at.beta, core.beta)),
        )
        walks = (
            (kernel.left, at.initial_state, last_at, borders_at),
            (kernel.right, dht_at, dh0_at, d_borders_at),
        )
        sums, of_walks, self._sums_size = None, [(0, 0, 0, 0)] * 2, 0
        if needs_dg:
            around = build.load(instances.for_scalar_decay(instances.mlstm_bwd()))
            workspace_bytes = around.mlstm_bwd_gates_workspace_bytes(shape.heads, shape.sequences)
            offsets = Sums.of(shape, kernel.anchor_bytes(of), workspace_bytes)
            self._sums_size = offsets.bytes // FLOAT
            sums = offsets.at(sums_at)
            of_walks = [sums.of_walk(number) for number in range(2)]
        launches: list[Launch] = [
            walk(of, *operands, *states, of_walk, written_at, core.scale, shape.states_walkers, shape.shared)
            for (walk, *states), of_walk in zip(walks, of_walks, strict=True)
        ]
        if sums is not None:
            assert given.g is not None and core.g is not None
            launches.append(
                around.mlstm_bwd_gates(
                    (sums.whole[0], sums.inter[0], shape.sum_parts),
                    (sums.whole[1], sums.inter[1], shape.sum_parts),
                    (sums.flows, shape.sum_parts),
                    NO_GATE, gate_at(at.g, core.g), NO_GATE,
                    gate_at(dg_at, torch.empty_like(given.g, device="meta")),
                    0, (at.initial_state, dh0_at, 0, 0), (last_at, dht_at, 0, 0), sums.workspace, of[:3],
                    (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
                )
            )  # fmt: skip
        self._launches = Launches.of(kernel, launches)

    def __call__(
        self, given: DeltaRuleCore, core: DeltaRuleCore, through: Through
    ) -> tuple[Tensor, Tensor, MaybeTensor]:
        """dq and dk, of every `Shape.shared` heads of v where that is not a whole group, and dg."""
        dq, dk = self._results(given)
        left = core.q.new_empty(self._partial)
        sums = dg = written = None
        if self._written_size:
            written = core.q.new_empty(self._written_size, dtype=torch.int32)
        if self._needs_dg:
            assert given.g is not None
            sums = core.q.new_empty(self._sums_size, dtype=torch.float32)
            dg = torch.empty_like(given.g)
        # those that the sums are of: the forward's and the mirror's are rounded otherwise
        last, dh0 = (core.q.new_empty(self._state, dtype=torch.float32) if x else None for x in self._leaves)
        self._launches.run(
            starts(*core[:9], *through, dq.written, dk.written, left, sums, dg, written, last, dh0),
            current_stream(self._shape.device),
        )
        return dq.filled(), dk.filled(), dg

    def _results(self, given: DeltaRuleCore, device: str | None = None) -> tuple[Result, Result]:
        """dq and dk as they are returned, or parts of them."""
        if self._shape.group == self._shape.shared:
            return Result.like(given.q, device), Result.like(given.k, device)
        dq, dk = (given.q.new_empty(self._partial, device=device) for _ in range(2))
        return Result(dq, dq), Result(dk, dk)


_INT = 4  # bytes of a number of written chunks
