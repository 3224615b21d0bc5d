"""The launches of the backward of the delta rule: one walk makes dq, dk and dv, or with K of more than 128
one walk makes dv, then two make dq and dk."""

from typing import Any

import torch

from tfla_tk.backends.tk.delta_rule.call import Left, Places, Shape
from tfla_tk.backends.tk.prepared import NO_GATE, NO_OPERAND, Launch, Scratch
from tfla_tk.backends.tk.scalar_gate.walks import FLOAT
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import DELTA_ANCHOR_CHUNKS, DELTA_DECAY_CHUNKS, DELTA_KEYS_WARPS


def one_walk(
    kernel: Any, shape: Shape, core: DeltaRuleCore, at: Any, left: Left, places: Places, scratch: Scratch
) -> list[Launch]:
    """The launches that carry gradients of states over a split, the walk, what makes dq and dk of parts of
    heads or of sums in fp32, and dg. at: the prepared addresses of core's tensors. left: what the forward has
    kept. scratch: gets places of what launches leave for each other."""
    of = shape.with_offsets(at.cu_seqlens, shape.split)
    q, k, gates, writes, *_ = places
    carried_at = scratch.take(shape.states_bytes(shape.carried, shape.dim_v))
    leads = left.leads + shape.leads_bytes if carried_at else 0  # behind the segments
    launches: list[Launch] = []
    if carried_at:
        launches += [
            kernel.mirror(
                of, q, k, places.do, NO_OPERAND, NO_OPERAND, *gates, (left.matrices, 0), 0, places.dht, 0,
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
) -> list[Launch]:
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
                NO_GATE, gates[0], NO_GATE, dg,
                0, (at.initial_state, dh0_at, 0, 0), (last_at, places.dht, 0, 0), workspace, of[:3],
                (shape.batch, shape.heads, shape.seq, shape.dim_k, shape.dim_v), True, shape.device,
            )
        )  # fmt: skip
    return launches + places.combining
