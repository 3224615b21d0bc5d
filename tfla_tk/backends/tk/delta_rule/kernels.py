"""The kernels that a call of the delta rule launches, and who launches them."""

from __future__ import annotations

from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.build import Launcher, instances
from tfla_tk.build.instances import Instance

Uses = list[tuple[Launcher, Instance]]


def tile_of_k(shape: Shape) -> int:
    """Of the kernels' K."""
    return instances.tile_of(shape.dim_k, instances.DELTA_TILES)


def of_forward(shape: Shape) -> Uses:
    """The forward's."""
    tile, half = tile_of_k(shape), shape.half
    makes = "in the walk" if shape.walk_makes_matrices else "by makers" if shape.makers else "given"
    found = [instances.delta_forward(tile, half, shape.forward_walkers, makes)]
    if makes == "given":
        found.append(instances.delta_matrices(tile, half, shape.matrices == 2))
    if shape.carried:
        found += [instances.delta_leads(), instances.delta_maps(tile, half), instances.delta_carry()]
    return [(instances.DELTA_FORWARD, instance) for instance in found]


def of_backward(shape: Shape, *, needs_dg: bool) -> Uses:
    """The backward's."""
    tile, half, walkers = tile_of_k(shape), shape.half, shape.mirror_walkers
    makes = ("right_part_and_sums" if needs_dg else "right_part") if shape.makes_right else "values"
    found = [instances.delta_mirror(tile, half, walkers, makes), instances.delta_strength()]
    if shape.carried:
        found += [instances.delta_mirror(tile, half, walkers, "states"), instances.delta_carry()]
    if shape.shared < shape.group:
        found.append(instances.delta_combine(half))
    tile_of_v = instances.DELTA_STATES_TILES[shape.dim_v > instances.DELTA_STATES_TILES[0]]
    walks = ["paired left" if shape.turns == 2 else "left", *([] if shape.makes_right else ["right"])]
    of_states = [instances.delta_states(walk, tile_of_v, half, shape.states_walkers) for walk in walks]
    of_gates = [instances.mlstm_bwd_gates(decay=True)] if needs_dg else []
    return [
        *((instances.DELTA_BACKWARD, instance) for instance in found),
        *((instance.launcher, instance) for instance in (*of_states, *of_gates)),
    ]


def of_inputs(shape: Shape, *, backward: bool) -> Uses:
    """What makes the inputs of raw ones, or the gradients of these."""
    instance = instances.delta_inputs(tile_of_k(shape), shape.half, backward)
    return [(instance.launcher, instance)]
