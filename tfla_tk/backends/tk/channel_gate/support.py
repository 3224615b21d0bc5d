"""What the kernels of gated linear attention support, and the modules that a call of them takes."""

from __future__ import annotations

from tfla_tk.backends.tk import device, refusals
from tfla_tk.build import Instance, instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.support import SUPPORTED, Support, together

SCHEDULES = ("auto", *instances.GLA_SCHEDULES)


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    refusals.check_schedule(variant, SCHEDULES)
    return (
        together(
            refusals.of_operands(call),
            refusals.of_head_dims(call, instances.MAX_DIM_QK, instances.MAX_DIM_V),
            _refusal_of_value_heads(call),
        )
        or refusals.of_count("heads", call.sequences * call.heads)
        or device.supports(call.device, _instances_of, *_key(call, variant))
    )


def _refusal_of_value_heads(call: LinearCall) -> Support | None:
    if call.value_heads == call.heads:
        return None
    return Support(False, f"v has {call.value_heads} heads, q and k {call.heads}", "repeat q, k and g")


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too, and compile what the cache lacks.

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    return SUPPORTED if call.is_empty else device.load(_instances_of, *_key(call, variant))


def _key(call: LinearCall, variant: str | None) -> tuple[int, int, str, bool]:
    """What tells the kernels of a call: plain numbers, also where torch.compile has the sizes as symbols."""
    dim_k = min(refusals.tile(call.dim_qk), max(instances.GLA_TILES))
    dim_v = min(refusals.tile(call.dim_v), max(instances.GLA_STATES_TILES))
    return dim_k, dim_v, refusals.named_schedule(variant), call.requires_grad


def _instances_of(dim_k: int, dim_v: int, schedule: str, gradients: bool) -> list[Instance]:
    """The modules that the kernels of a call are in."""
    found = [instances.gla("forward", dim_k, schedule), instances.gla_segments()]
    if gradients:
        found += [instances.gla("backward", dim_k, schedule), instances.gla_states(dim_v)]
    return found
