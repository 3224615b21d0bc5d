"""What the kernels of KDA support, and the modules that a call of them takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tfla_tk.backends.tk import device, refusals
from tfla_tk.backends.tk.kda.call import MOST_TRAINED_V, Shape
from tfla_tk.build import instances
from tfla_tk.calls.kda import KDACall
from tfla_tk.core.support import Support, together


def supports_kda(call: KDACall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant.

    CUDA is only touched for calls on a CUDA device.
    """
    refusals.check_variant(variant)
    return (
        together(
            refusals.of_operands(call),
            refusals.of_head_dims(call, max(instances.KDA_TILES), instances.MAX_DIM_V),
            _refusal_of_gradients(call),
            _refusal_of_states(call),
        )
        or refusals.of_count("value heads", call.sequences * call.value_heads)
        or _of_kernels(call, partial(device.supports, call.device))
    )


def load(call: KDACall) -> Support:
    """Load the kernels of a call that is supported, and compile what the cache lacks; as `device.load`."""
    return _of_kernels(call, device.load)


def _of_kernels(call: KDACall, judge: Callable[..., Support]) -> Support:
    """What `judge` says of the kernels of a call, and of the one of another launcher that it may take."""
    found = judge(_kernels_of, *_key(call))
    if found.ok and call.requires_grad and call.value_heads > call.heads:
        return judge(_combine_of, call.dtype == torch.float16)
    return found


def _refusal_of_gradients(call: KDACall) -> Support | None:
    if not call.requires_grad or call.dim_v <= MOST_TRAINED_V:
        return None
    reason = f"V = {call.dim_v}, of a call with gradients the kernels take {MOST_TRAINED_V}"
    return Support(False, reason, "use backend 'triton', or torch.no_grad()")


def _refusal_of_states(call: KDACall) -> Support | None:
    if not call.intermediate_states:
        return None
    reason = "return_intermediate_states: the kernels keep no states between chunks for the caller"
    return Support(False, reason, "use backend 'triton'")


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
