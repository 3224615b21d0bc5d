"""What the kernels of the delta rule support, and the modules that a call of them takes."""

from __future__ import annotations

from tfla_tk.backends.tk import device, refusals
from tfla_tk.build import Instance, instances
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.support import SUPPORTED, Support, together

# what the kernels make themselves of the raw inputs
NATIVE = frozenset({"qk_l2norm", "beta_sigmoid", "gate"})
SCHEDULES = ("auto", *instances.DELTA_SCHEDULES)


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    refusals.check_schedule(variant, SCHEDULES)
    return (
        together(
            refusals.of_operands(call),
            refusals.of_head_dims(call, max(instances.DELTA_TILES), instances.MAX_DIM_V),
            refusals.of_scale(call),
        )
        or refusals.of_count("value heads", call.sequences * call.value_heads)
        or device.supports(call.device, _instances_of, *_key(call, variant))
    )


def load(kernel: str, call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too, and compile what the cache lacks.

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    return SUPPORTED if call.is_empty else device.load(_instances_of, *_key(call, variant))


def _key(call: DeltaRuleCall, variant: str | None) -> tuple[int, int, str, bool]:
    """What tells the kernels of a call: plain numbers, also where torch.compile has the sizes as symbols."""
    tiles = refusals.tile(call.dim_qk), refusals.tile(call.dim_v)
    return *tiles, refusals.named_schedule(variant), call.requires_grad


def _instances_of(dim_k: int, dim_v: int, schedule: str, gradients: bool) -> list[Instance]:
    """The modules that the kernels of a call are in."""
    found = [instances.delta_rule("forward", dim_k, schedule)]
    if gradients:
        found.append(instances.delta_rule("backward", dim_k, schedule))
        found += [instances.delta_states(dim_v), instances.for_scalar_decay(instances.mlstm_bwd())]
    return found
