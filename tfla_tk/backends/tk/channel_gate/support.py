"""What the kernels of gated linear attention support, and the modules that a call of them takes."""

from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.channel_gate.call import Shape
from tfla_tk.build import instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import Cut
from tfla_tk.core.support import Support


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call, on a CUDA device alone; ValueError for a variant."""
    of_heads = None
    if call.value_heads != call.heads:
        reason = f"v has {call.value_heads} heads, q and k {call.heads}"
        of_heads = Support(False, reason, "repeat q, k and g")
    most = instances.MAX_DIM_QK, instances.MAX_DIM_V
    return refusals.of_call(call, variant, most, of_heads) or device.supports(call.device, *kernels_for(call))


def kernels_for(call: LinearCall) -> tuple[Any, ...]:
    """What tells the kernels of a call, for `device.load`: plain numbers, also where torch.compile has the
    sizes as symbols."""
    dims = refusals.tile(call.dim_qk), refusals.tile(call.dim_v)
    return _kernels_of, *dims, call.dtype == torch.float16, call.requires_grad


def _kernels_of(dim_k: int, dim_v: int, half: bool, gradients: bool) -> device.Kernels:
    """The kernels that most such calls take; what others take is loaded when they are launched."""
    shape = Shape(8, 8, 16, 8192, dim_k, dim_v, half, 0, False, Cut(8, 8192), True)
    found = [shape.walk("forward")]
    if gradients:
        found += [shape.walk("backward"), shape.states_walk("left"), shape.states_walk("right")]
    return instances.GLA, tuple(found)
