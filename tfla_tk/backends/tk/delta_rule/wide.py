"""The backward of the delta rule with K of more than 128: a walk for dv, then two for dq and dk."""

from __future__ import annotations

from typing import Any

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.call import NO_GATE, Left, Places, Shape
from tfla_tk.backends.tk.prepared import Launch, Scratch
from tfla_tk.backends.tk.scalar_gate.walks import FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import DELTA_ANCHOR_CHUNKS


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
    workspace = anchors = flows = flow_bytes = last_at = dh0_at = 0
    whole = inter = [
        0,
        0,
    ]  # sums of every token and of every chunk, of the walk forward in time and of the other
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
                NO_GATE, gates[0], NO_GATE, dg,
                0, (at.initial_state, dh0_at, 0, 0), (last_at, places.dht, 0, 0), workspace, of[:3],
                (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
            )
        )  # fmt: skip
    return launches + places.combining
