"""What the kernels of gated linear attention support, and the modules that a call of them takes."""

from __future__ import annotations

import torch

from tfla_tk.backends.tk import device
from tfla_tk.build import Instance, instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.checks import fail
from tfla_tk.core.support import SUPPORTED, Support

SCHEDULES = ("auto", *instances.GLA_SCHEDULES)
_MAX_DIM_K, _MAX_DIM_V = max(instances.GLA_TILES), instances.MAX_DIM_V
_OPERAND_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SEQUENCES = 2**31 - 1  # of all heads, which the kernels count in an int


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    if variant is not None and variant not in SCHEDULES:
        fail("backend", f"'tk' or 'tk:' and one of {', '.join(SCHEDULES)}", repr(f"tk:{variant}"))
    if call.device.type != "cuda":
        return device.not_on_a_gpu(call.device)
    if call.dtype not in _OPERAND_DTYPES:
        return Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16 or torch.float16")
    if call.requires_grad:
        return Support(
            False,
            "the kernels of GLA have a forward alone, and a gradient is recorded",
            "call under torch.no_grad(), or use 'triton' or 'reference'",
        )
    if call.dim_qk > _MAX_DIM_K or call.dim_v > _MAX_DIM_V or call.dim_qk % 16 or call.dim_v % 16:
        return Support(
            False,
            f"head dims are K = {call.dim_qk}, V = {call.dim_v}",
            f"use multiples of 16 up to {_MAX_DIM_K} and {_MAX_DIM_V}",
        )
    if call.value_heads != call.heads:
        return Support(False, f"v has {call.value_heads} heads, q and k {call.heads}", "repeat q, k and g")
    count = call.sequences * call.heads
    if count > _MOST_SEQUENCES:
        reason = f"sequences x heads = {count:,}, the kernels take {_MOST_SEQUENCES:,}"
        return Support(False, reason, "split the batch or the heads")
    return device.supports(call.device, _instances_of, *_key(call, variant))


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Load the kernels of a call that is supported, and compile what the cache lacks.

    Returns:
        Whether the call can be served.

    Raises:
        CaptureError: something would have to be compiled while a CUDA graph is being captured.
    """
    return SUPPORTED if call.is_empty else device.load(_instances_of, *_key(call, variant))


def named_schedule(schedule: str | None) -> str:
    """The schedule that "auto", or none, stands for."""
    return instances.DEFAULT_SCHEDULE if schedule in (None, "auto") else str(schedule)


def _key(call: LinearCall, variant: str | None) -> tuple[int, str]:
    """What tells the kernels of a call: plain numbers, also where torch.compile has the sizes as symbols."""
    return (64 if call.dim_qk <= 64 else 128), named_schedule(variant)


def _instances_of(dim_k: int, schedule: str) -> list[Instance]:
    """The modules that the kernels of a call are in."""
    return [instances.gla("forward", dim_k, schedule)]
