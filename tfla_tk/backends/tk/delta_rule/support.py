"""What the kernels of the delta rule support, and the modules that a call of them takes."""

from __future__ import annotations

import torch

from tfla_tk.backends.tk import device
from tfla_tk.backends.tk.scalar_gate import passes
from tfla_tk.build import Instance, instances
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.checks import fail
from tfla_tk.core.support import SUPPORTED, Support

# what the kernels make themselves of the raw inputs
NATIVE: frozenset[str] = frozenset()
SCHEDULES = ("auto", *instances.DELTA_SCHEDULES)
_MAX_DIM_K, _MAX_DIM_V = max(instances.DELTA_TILES), instances.MAX_DIM_V
_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SEQUENCES = 2**31 - 1  # of all heads, which the kernels count in an int


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    if variant is not None and variant not in SCHEDULES:
        fail("backend", f"'tk' or 'tk:' and one of {', '.join(SCHEDULES)}", repr(f"tk:{variant}"))
    if call.device.type != "cuda":
        return device.not_on_a_gpu(call.device)
    if call.dtype not in _OPERAND_DTYPES:
        return Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16 or torch.float16")
    if call.dim_qk > _MAX_DIM_K or call.dim_v > _MAX_DIM_V or call.dim_qk % 16 or call.dim_v % 16:
        return Support(
            False,
            f"head dims are K = {call.dim_qk}, V = {call.dim_v}",
            f"use multiples of 16 up to {_MAX_DIM_K} and {_MAX_DIM_V}",
        )
    if not call.scale > 0:
        return Support(False, f"scale = {call.scale}, the kernels take positive ones", "scale q by -1")
    count = call.sequences * call.value_heads
    if count > _MOST_SEQUENCES:
        reason = f"sequences x value heads = {count:,}, the kernels take {_MOST_SEQUENCES:,}"
        return Support(False, reason, "split the batch or the heads")
    return device.supports(call.device, _instances_of, *_key(call, variant))


def load(kernel: str, call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, for its gradients too, and compile what the cache lacks.

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    return SUPPORTED if call.is_empty else device.load(_instances_of, *_key(call, variant))


def named_schedule(schedule: str | None) -> str:
    """The schedule that "auto", or none, stands for."""
    return instances.DEFAULT_SCHEDULE if schedule in (None, "auto") else str(schedule)


def walks_states(dim_v: int) -> bool:
    """Whether the gradients of q and k are those of this family's own walks, not of scalar_gate's."""
    return dim_v <= max(instances.DELTA_STATES_TILES)


def _key(call: DeltaRuleCall, variant: str | None) -> tuple[int, int, str, bool]:
    """What tells the kernels of a call: plain numbers, also where torch.compile has the sizes as symbols."""
    return _tile(call.dim_qk), _tile(call.dim_v), named_schedule(variant), call.requires_grad


def _tile(dim: int) -> int:
    tile = 64
    while tile < dim:
        tile *= 2
    return tile


def _instances_of(dim_k: int, dim_v: int, schedule: str, gradients: bool) -> list[Instance]:
    """The modules that the kernels of a call are in."""
    found = [instances.delta_rule("forward", dim_k, schedule)]
    if gradients:
        found.append(instances.delta_rule("backward", dim_k, schedule))
        if walks_states(dim_v):
            found += [instances.delta_states(dim_v), instances.for_scalar_decay(instances.mlstm_bwd())]
        else:
            found += passes.instances_of(dim_k, dim_v, decay=True)
    return found
