"""The backward of the delta rule with K up to 128: one walk makes dq, dk and dv."""

from __future__ import annotations

from typing import Any

import torch

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule.call import NO_OPERAND, Left, Places, Shape
from tfla_tk.backends.tk.prepared import Launch, Scratch
from tfla_tk.backends.tk.scalar_gate.walks import FLOAT
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import DELTA_DECAY_CHUNKS, DELTA_KEYS_WARPS


def launch_gradients(
    shape: Shape,
    core: DeltaRuleCore,
    at: Any,
    left: Left,
    places: Places,
    scratch: Scratch,
) -> list[Launch]:
    """The launches: those that carry gradients of states over a split, the walk, what makes dq and dk of
    parts of heads or of sums in fp32, and dg.

    Args:
        core: as `readable` leaves it. at: the prepared addresses of its tensors.
        left: what the forward has kept.
        scratch: gets places of what the launches leave for each other.
    """
    kernel = build.load(instances.DELTA_RULE)
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
