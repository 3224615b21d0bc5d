"""The reference as a backend of the operators in [B, T, H, D]: any device and floating dtype, any shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla_tk.backends.reference.common import has_no_values, supports_form
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import Support
from tfla_tk.ops import simple_gla as ops


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    return supports_form(variant)


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    form = variant or "chunkwise"
    *inputs, cu_seqlens, cu_seqlens_cpu = tensors
    if has_no_values(cu_seqlens):
        return ops.packed_simple_gla(call, form, tensors)
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    o, last = ops.reference(call, form, (*inputs, offsets, None))
    # without a token it may be the initial state itself
    return o, last.clone() if last is not None and call.seq == 0 else last
