"""The backward of the delta rule with K of more than 128: a walk for dv, then two for dq and dk."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.call import NO_GATE, Left, Places, Shape
from tfla_tk.backends.tk.prepared import Launch, Scratch
from tfla_tk.backends.tk.scalar_gate.walks import ALIGNMENT, FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import DELTA_ANCHOR_CHUNKS


class Sums(NamedTuple):
    """What the walks leave for dg, fp32: bytes from the start of their allocation, or addresses.

    Attributes:
        workspace: of the gates' kernels.
        anchors: the states at the anchors.
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
        parts = shape.batch * shape.heads * shape.sum_parts  # of each walk
        flows = parts * (shape.slots // DELTA_ANCHOR_CHUNKS + 1) * FLOAT
        whole, inter = parts * shape.seq * FLOAT, parts * shape.slots * 2 * FLOAT
        sizes = (workspace_bytes, anchor_bytes, 2 * flows, whole, whole, inter, inter)
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


def launch_wide(
    shape: Shape,
    core: DeltaRuleCore,
    at: Any,
    left: Left,
    places: Places,
    scratch: Scratch,
) -> list[Launch]:
    """The launches of the mirror, of the walks for dq and dk, of what adds up their parts, and of dg.

    Args:
        core: as `readable` leaves it. at: the prepared addresses of its tensors.
        left: what the forward has kept.
        scratch: gets places of what the launches leave for each other.
    """
    kernel = build.load(instances.DELTA_RULE)
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
    sums, of_walks, last_at, dh0_at = None, [(0, 0, 0, 0)] * 2, 0, 0
    if dg is not None:
        workspace_bytes = kernel.mlstm_bwd_gates_workspace_bytes(shape.heads, shape.sequences)
        offsets = Sums.of(shape, kernel.anchor_bytes(of), workspace_bytes)
        sums = offsets.at(scratch.take(offsets.bytes))
        of_walks = [sums.of_walk(number) for number in range(2)]
        # those that the sums are of: the forward's and the mirror's are rounded otherwise
        state_bytes = shape.states_bytes(shape.sequences, shape.dim_v)
        last_at = scratch.take(state_bytes) if places.dht else 0
        dh0_at = scratch.take(state_bytes) if at.initial_state else 0
    of_left, of_right = of_walks
    options = written_at, low_at, core.scale, shape.shared
    launches = [
        mirror,
        kernel.left(of, *operands, at.initial_state, last_at, left.borders, of_left, *options),
        kernel.right(of, *operands, places.dht, dh0_at, d_borders, of_right, *options),
    ]
    if sums is not None and dg is not None:
        launches.append(
            kernel.mlstm_bwd_gates(
                (sums.whole[0], sums.inter[0], shape.sum_parts),
                (sums.whole[1], sums.inter[1], shape.sum_parts),
                (sums.flows, sums.flows + sums.flow_bytes, shape.sum_parts, DELTA_ANCHOR_CHUNKS),
                NO_GATE, gates[0], NO_GATE, dg,
                0, (at.initial_state, dh0_at, 0, 0), (last_at, places.dht, 0, 0), sums.workspace, of[:3],
                (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
            )
        )  # fmt: skip
    return launches + places.combining
