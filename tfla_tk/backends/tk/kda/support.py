"""What the kernels of KDA support, and the modules that a call of them takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.kda.call import MOST_TRAINED_V, Shape
from tfla_tk.build import instances
from tfla_tk.calls.kda import KDACall
from tfla_tk.core.support import Support


def supports_kda(call: KDACall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call, on a CUDA device alone; ValueError for a variant."""
    of_gradients = of_states = None
    if call.requires_grad and call.dim_v > MOST_TRAINED_V:
        reason = f"V = {call.dim_v}, of a call with gradients the kernels take {MOST_TRAINED_V}"
        of_gradients = Support(False, reason, "use backend 'triton', or torch.no_grad()")
    if call.intermediate_states:
        reason = "return_intermediate_states: the kernels keep no states between chunks for the caller"
        of_states = Support(False, reason, "use backend 'triton'")
    most = max(instances.KDA_TILES), instances.MAX_DIM_V
    refusal = refusals.of_call(call, variant, most, of_gradients, of_states)
    return refusal or _of_kernels(call, partial(device.supports, call.device))


def load(call: KDACall) -> Support:
    """Load the kernels of a call that is supported, and compile what the cache lacks; as `device.load`."""
    return _of_kernels(call, device.load)


def _of_kernels(call: KDACall, judge: Callable[..., Support]) -> Support:
    """What `judge` says of the kernels of a call, and of the one of another launcher that it may take."""
    found = judge(_kernels_of, *_key(call))
    if found.ok and call.requires_grad and call.value_heads > call.heads:
        return judge(_combine_of, call.dtype == torch.float16)
    return found


def _key(call: KDACall) -> tuple[Any, ...]:
    """The arguments of `_kernels_of`: plain numbers, the head dims alone where torch.compile has sizes as
    symbols."""
    dims = refusals.tile(call.dim_qk), refusals.tile(call.dim_v)
    known = device.known_sizes(call.device, call.sequences, call.value_heads, call.seq)
    return dims, (call.dtype == torch.float16, call.requires_grad), known


def _kernels_of(
    dims: tuple[int, int], options: tuple[bool, bool], sizes: tuple[int, ...] | None
) -> device.Kernels:
    """The kernels of a call; without sizes those that most such calls take. What others take is loaded when
    they are launched."""
    half, trains = options
    sequences, heads, seq, where = sizes or (8, 16, 8192, 0)
    shape = Shape(sequences, 0, sequences, heads, seq, *dims, 1, half, where, False)
    return instances.KDA, (*shape.kernels, *(shape.backward_kernels if trains else ()))


def _combine_of(half: bool) -> device.Kernels:
    """What adds up dq and dk of heads that share one."""
    return instances.DELTA_RULE, (instances.delta_combine(half),)
