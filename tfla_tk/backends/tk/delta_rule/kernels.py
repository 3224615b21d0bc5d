"""The kernels that a call of the delta rule launches."""

from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance


def of_forward(shape: Shape) -> list[Instance]:
    """The forward's."""
    tile, half = _tile_of_k(shape), shape.half
    makes = "in the walk" if shape.walk_makes_matrices else "by makers" if shape.makers else "given"
    found = [instances.delta_forward(tile, half, shape.forward_walkers, makes)]
    if makes == "given":
        found.append(instances.delta_matrices(tile, half, shape.matrices == 2))
    if shape.carried:
        found += [
            instances.delta_of_all("leads"),
            instances.delta_maps(tile, half),
            instances.delta_of_all("carry"),
        ]
    return found


def of_backward(shape: Shape, *, needs_dg: bool) -> list[Instance]:
    """The backward's."""
    tile, half = _tile_of_k(shape), shape.half
    found = [instances.delta_of_all("strength")]
    if shape.is_wide:
        left = "paired left" if shape.turns == 2 else "left"
        found += [instances.delta_mirror(tile, half, shape.mirror_walkers)]
        found += [instances.delta_states(walk, half) for walk in (left, "right")]
        of_dg = instances.mlstm_bwd_gates(decay=True)
    else:
        found.append(instances.delta_gradients(half, needs_dg))
        if shape.carried:
            found += [
                instances.delta_mirror(tile, half, shape.mirror_walkers),
                instances.delta_of_all("carry"),
            ]
        of_dg = instances.delta_of_all("decay")
    if shape.combines:
        found.append(instances.delta_combine(half))
    return found + ([of_dg] if needs_dg else [])


def of_inputs(shape: Shape, *, backward: bool) -> Instance:
    """What makes the inputs of raw ones, or the gradients of these."""
    return instances.delta_inputs(_tile_of_k(shape), shape.half, backward)


def _tile_of_k(shape: Shape) -> int:
    return instances.tile_of(shape.dim_k, instances.DELTA_TILES)
