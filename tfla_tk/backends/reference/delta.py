"""The reference as a backend of the delta rule: any device and floating dtype, any shape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla_tk.backends.reference.common import form_of, has_no_values, supports_form
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import Support
from tfla_tk.ops import delta_rule as ops


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    return supports_form(variant)


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    form = form_of(call, variant)
    *inputs, cu_seqlens, cu_seqlens_cpu = tensors
    if has_no_values(cu_seqlens):
        return ops.packed_delta_rule(call, form, tensors)
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    o, last = ops.reference(call, form, (*inputs, offsets, None))
    # without a token it may be the initial state itself
    return o, last.clone() if last is not None and call.seq == 0 else last
