"""What the kernels of the delta rule support, and the kernels that a call launches."""

from functools import partial
from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.build import instances
from tfla_tk.build.instances import Instance
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import CHUNK
from tfla_tk.core.support import Support


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    most = max(instances.DELTA_TILES), instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, refusals.of_scale(call))
    return refusal or device.supports(call.device, *_kernels_for(call))


def load(call: DeltaRuleCall) -> Support:
    return device.load(*_kernels_for(call))


def _kernels_for(call: DeltaRuleCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, as `device.load` takes it: plain numbers, the head dims alone where
    torch.compile has sizes as symbols."""
    dims, raw = (
        (refusals.power_of_two(call.dim_qk), refusals.power_of_two(call.dim_v)),
        call.qk_l2norm or call.beta_sigmoid,
    )
    options = call.dtype == torch.float16, raw or call.gate == "raw", call.gate != "none", call.requires_grad
    sizes = call.sequences, call.batch, call.value_heads, call.seq, call.heads
    known = device.known_sizes(call.device, *sizes)
    return _kernels_of, dims, options, known and (*known, call.varlen, call.batch_invariant)


def _kernels_of(
    dims: tuple[int, int], options: tuple[bool, bool, bool, bool], sizes: tuple[int, ...] | None
) -> device.Kernels:
    """The kernels of a call; without sizes those that most such calls take. What others take is loaded when
    they are launched."""
    half, raw, decays, trains = options
    sequences, batch, value_heads, seq, heads, device, packed, invariant = sizes or _TYPICAL
    slots, group = -(-seq // CHUNK) + (sequences if packed else 0), value_heads // heads
    of_call = bool(packed), bool(invariant), decays, trains
    shape = Shape(sequences, slots, batch, value_heads, seq, *dims, group, half, device, False, *of_call)
    found = of_forward(shape)
    if trains:
        found += of_backward(shape, needs_dg=decays)
    if raw:
        found += [of_inputs(shape, backward=backward) for backward in {False, trains}]
    return instances.DELTA_RULE, tuple(dict.fromkeys(found))


# sequences, batch, heads of v, tokens, heads of q and k, device, packed, batch_invariant
_TYPICAL = (8, 8, 16, 8192, 16, 0, False, False)


def of_forward(shape: Shape) -> list[Instance]:
    of, tile, walkers = (
        partial(instances.kernel_of, half=shape.half),
        _tile_of_k(shape),
        shape.forward_walkers,
    )
    if shape.walk_makes_matrices or shape.makers:
        way = "in_walk" if shape.walk_makes_matrices else "makers"
        found = [of(f"delta_forward_{way}", tile=tile, walkers=walkers)]
    else:
        found = [of("delta_forward", tile=tile, walkers=walkers)]
        found.append(of("delta_matrices", tile=tile, scores=shape.matrices == 2))
    if shape.carried:
        found += [of("delta_maps", tile=tile), *map(instances.kernel_of, ("delta_leads", "delta_carry"))]
    return found


def of_backward(shape: Shape, *, needs_dg: bool) -> list[Instance]:
    of = partial(instances.kernel_of, half=shape.half)
    mirror = of("delta_mirror", tile=_tile_of_k(shape), walkers=shape.mirror_walkers)
    found = [instances.kernel_of("delta_strength")]
    if shape.is_wide:
        found += [mirror, of("delta_left"), of("delta_right")]
        of_dg = instances.mlstm_bwd_gates(decay=True)
    else:
        found.append(of("delta_gradients", and_sums=needs_dg))
        if shape.carried:
            found += [mirror, instances.kernel_of("delta_carry")]
        of_dg = instances.kernel_of("delta_decay")
    if shape.combines:
        found.append(of("delta_combine"))
    return found + ([of_dg] if needs_dg else [])


def of_inputs(shape: Shape, *, backward: bool) -> Instance:
    """What makes the inputs of raw ones, or the gradients of these."""
    name = f"delta_inputs{'_backward' if backward else ''}"
    return instances.kernel_of(name, shape.half, tile=_tile_of_k(shape))


def _tile_of_k(shape: Shape) -> int:
    return instances.tile_of(shape.dim_k, instances.DELTA_TILES)
