"""What the kernels of the delta rule support, and the modules that a call of them takes."""

from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.delta_rule import kernels
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.build import instances
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import CHUNK
from tfla_tk.core.support import Support


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call, on a CUDA device alone; ValueError for a variant."""
    most = max(instances.DELTA_TILES), instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, refusals.of_scale(call))
    return refusal or device.supports(call.device, *kernels_for(call))


def kernels_for(call: DeltaRuleCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, as `device.load` takes it: plain numbers, the head dims alone where
    torch.compile has sizes as symbols."""
    dims, raw = (refusals.tile(call.dim_qk), refusals.tile(call.dim_v)), call.qk_l2norm or call.beta_sigmoid
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
    found = kernels.of_forward(shape)
    if trains:
        found += kernels.of_backward(shape, needs_dg=decays)
    if raw:
        found += [kernels.of_inputs(shape, backward=backward) for backward in {False, trains}]
    return instances.DELTA_RULE, tuple(dict.fromkeys(found))


# sequences, batch, heads of v, tokens, heads of q and k, device, packed, batch_invariant
_TYPICAL = (8, 8, 16, 8192, 16, 0, False, False)
