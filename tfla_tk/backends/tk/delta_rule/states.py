"""The walks of the delta rule's backward over the states, for dq and dk, and dg from their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.call import NO_GATE, NO_OPERAND, Shape, gate_at
from tfla_tk.backends.tk.operands import Gate, Operand
from tfla_tk.backends.tk.prepared import Launch, Scratch, operand_at
from tfla_tk.backends.tk.scalar_gate.walks import ALIGNMENT, FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import DELTA_ANCHOR_CHUNKS


class Through(NamedTuple):
    """What the walks read besides the call's own tensors, at prepared addresses.

    Attributes:
        writes, dv, do: the writes that the forward has kept, and the gradients.
        dht: that of the final state, 0 for none. dh0: that of the initial state, which the mirror leaves.
        borders, d_borders: the states and their gradients at the borders between segments, 0 where every
            sequence is one segment.
    """

    writes: Operand
    dv: Operand
    do: Operand
    dht: int
    dh0: int
    borders: int
    d_borders: int


class Sums(NamedTuple):
    """What the walks leave for dg, fp32: bytes from the start of their allocation, or addresses.

    Attributes:
        workspace: of the gates' kernels.
        anchors: the states at the anchors, or their gradients where the mirror makes the right part of dk.
        flows: of gradient over these, for the chunks behind an anchor; then as many for those before it.
        flow_bytes: of each.
        whole, inter: of every token and of every chunk, of the walk forward in time and of the other one.
        bytes: of all; no address.
    """

    workspace: int
    anchors: int
    flows: int
    flow_bytes: int
    whole: tuple[int, int]
    inter: tuple[int, int]
    bytes: int

    @staticmethod
    def of(shape: Shape, anchor_bytes: int, workspace_bytes: int) -> Sums:
        """The offsets."""
        heads = shape.batch * shape.heads
        parts = heads * shape.sum_parts, heads * shape.right_sum_parts  # of each walk
        flows = parts[0] * (shape.slots // DELTA_ANCHOR_CHUNKS + 1) * FLOAT
        whole, inter = ([x * size for x in parts] for size in (shape.seq * FLOAT, shape.slots * 2 * FLOAT))
        sizes = (workspace_bytes, anchor_bytes, 2 * flows, *whole, *inter)
        at = [0]
        for size in sizes:
            at.append(at[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return Sums(at[0], at[1], at[2], flows, (at[3], at[4]), (at[5], at[6]), at[7])

    def at(self, address: int) -> Sums:
        """The addresses in an allocation."""
        whole, inter = ((x + address, y + address) for x, y in (self.whole, self.inter))
        anchors, flows = self.anchors + address, self.flows + address
        return Sums(self.workspace + address, anchors, flows, self.flow_bytes, whole, inter, 0)

    def of_walk(self, number: int) -> tuple[int, int, int, int]:
        """As a walk takes them."""
        return self.whole[number], self.inter[number], self.anchors, self.flows


def launch_states(
    shape: Shape,
    core: DeltaRuleCore,
    at: Any,
    through: Through,
    dq: Operand,
    dk: Operand,
    dg: Gate | None,
    scratch: Scratch,
    mirror: Callable[[Operand, tuple[int, int, int]], Launch],
) -> list[Launch]:
    """The launches of the mirror, of the walks for dq and dk, and of dg from their sums.

    Args:
        core: as `readable` leaves it. at: the prepared addresses of its tensors.
        dq, dk: of every `Shape.shared` heads of v.
        dg: None where it is not wanted.
        scratch: gets places of what the launches leave for each other.
        mirror: prepares the mirror, which makes the right part of dk at an operand, and its sums at
            addresses, where these are not 0.
    """
    kernel = build.load(instances.DELTA_RULE)
    of = shape.with_offsets(at.cu_seqlens, shape.cut)
    makes_right = shape.makes_right
    # parts of dk for the last walk: the left one, or those of every head and slice of V that the mirror makes
    if not makes_right:
        left, right = scratch.take_dense(shape.partial, core.q.itemsize), NO_OPERAND
    elif shape.turns == 1:
        left = right = dk
    else:
        heads = shape.heads * shape.states_slices
        parts = (shape.batch, shape.seq, heads, shape.dim_k)
        left, right = dk, scratch.take_dense(parts, core.q.itemsize)
    written_at = scratch.take(kernel.written_bytes(of, shape.shared))
    low_at = 0 if makes_right else scratch.take(kernel.low_bytes(of, shape.shared))
    operands = (
        *(operand_at(at.q, core.q), operand_at(at.k, core.k), through.writes, through.do, through.dv),
        *(dq, left, dk, right, gate_at(at.g, core.g), gate_at(at.beta, core.beta)),
    )
    sums, of_walks, last_at, dh0_at = None, [(0, 0, 0, 0)] * 2, 0, 0
    if dg is not None:
        workspace_bytes = kernel.mlstm_bwd_gates_workspace_bytes(shape.heads, shape.sequences)
        offsets = Sums.of(shape, kernel.anchor_bytes(of), workspace_bytes)
        sums = offsets.at(scratch.take(offsets.bytes))
        of_walks = [sums.of_walk(number) for number in range(2)]
        # those that the sums are of: the forward's is rounded otherwise, and so is the mirror's dS beside a
        # right walk
        state_bytes = shape.states_bytes(shape.sequences, shape.dim_v)
        last_at = scratch.take(state_bytes) if through.dht else 0
        dh0_at = through.dh0
        if at.initial_state and not makes_right:
            dh0_at = scratch.take(state_bytes)
    of_left, of_right = of_walks
    options = written_at, low_at, core.scale, shape.states_walkers, shape.shared
    left_walk = kernel.left(of, *operands, at.initial_state, last_at, through.borders, of_left, *options)
    if makes_right:
        launches = [mirror(right, of_right[:3]), left_walk]
    else:
        right_walk = kernel.right(of, *operands, through.dht, dh0_at, through.d_borders, of_right, *options)
        launches = [mirror(NO_OPERAND, (0, 0, 0)), left_walk, right_walk]
    if sums is not None and dg is not None:
        launches.append(
            kernel.mlstm_bwd_gates(
                (sums.whole[0], sums.inter[0], shape.sum_parts),
                (sums.whole[1], sums.inter[1], shape.right_sum_parts),
                (sums.flows, sums.flows + sums.flow_bytes, shape.sum_parts, DELTA_ANCHOR_CHUNKS),
                NO_GATE, gate_at(at.g, core.g), NO_GATE, dg,
                0, (at.initial_state, dh0_at, 0, 0), (last_at, through.dht, 0, 0), sums.workspace, of[:3],
                (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
            )
        )  # fmt: skip
    return launches
