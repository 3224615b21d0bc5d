"""The ThunderKittens kernels of the operators in [B, T, H, D]: what they support, how a call is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tfla_tk import simple_gla_ops
from tfla_tk.backends import tk
from tfla_tk.backends.tk import load as load
from tfla_tk.build import instances
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.installed import find_package
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.memo import is_plain
from tfla_tk.core.support import Support

# looked up once at import, so that torch.compile sees a constant
_HAS_KERNELS = find_package("tfla_tk.backends.tk_scalar_decay") is not None
_MOST_HEADS = 2**31 - 1  # of all sequences, which the kernels count in an int


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether the kernels for a scalar decay serve a call; ValueError for a variant that is no schedule.

    CUDA is only touched for calls on a CUDA device.
    """
    tk._check_schedule(variant)
    if call.device.type != "cuda":
        return tk._not_on_a_gpu(call.device)
    if call.dtype not in tk._OPERAND_DTYPES:
        return Support(False, f"q, k, v are {call.dtype}", "use torch.bfloat16 or torch.float16")
    if (
        call.dim_qk > instances.MAX_DIM_QK
        or call.dim_v > instances.MAX_DIM_V
        or call.dim_qk % 16
        or call.dim_v % 16
    ):
        return Support(
            False,
            f"head dims are K = {call.dim_qk}, V = {call.dim_v}",
            f"use multiples of 16 up to {instances.MAX_DIM_QK} and {instances.MAX_DIM_V}",
        )
    if call.sequences * call.value_heads > _MOST_HEADS:
        count = call.sequences * call.value_heads
        reason = f"sequences x value heads = {count:,}, the kernels take {_MOST_HEADS:,}"
        return Support(False, reason, "split the batch or the heads")
    if not _HAS_KERNELS:
        return Support(False, "this version has no kernels for a scalar decay", "use another backend")
    return tk._on_this_machine("simple_gla", call, variant)


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    return simple_gla_ops.simple_gla(call, variant or "auto", *tensors)


def prepare_simple_gla(
    call: LinearCall, variant: str | None, tensors: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """`simple_gla` without the op, for plain eager calls with tensors like these."""
    if call.is_empty or not is_plain(tensors):
        return None
    return simple_gla_ops.prepare_simple_gla(call, variant or "auto", tensors)
