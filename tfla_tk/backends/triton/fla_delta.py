"""Adapters onto fla's delta rule: chunk_delta_rule, and chunk_gated_delta_rule where there is a decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla_tk.backends.triton.fla import (
    FLA_OPS,
    call_fla,
    common_options,
    refusal_of_call,
    too_many_heads,
    uneven_heads,
    verdict_on_gradients,
)
from tfla_tk.backends.triton.installation import load_module
from tfla_tk.calls.delta_rule import DeltaRuleCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import Support, together

_MOST_KEYS = 256


def supports_delta_rule(call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Whether fla serves the call correctly; ValueError for a variant but "fla"."""
    op = _op(call)
    found = [refusal_of_call(op, call, variant)]
    if call.gate == "none":
        found.append(uneven_heads(call))
    if call.dim_qk > _MOST_KEYS:
        found.append(Support(False, f"K = {call.dim_qk}, fla takes {_MOST_KEYS}", "use the reference"))
    gated = call.gate != "none"
    return together(*found) or too_many_heads(call) or verdict_on_gradients(call, gated=gated)


def load(kernel: str, call: DeltaRuleCall, variant: str | None = None) -> Support:
    """Import what serves a call that is supported."""
    return load_module(FLA_OPS[_op(call)])


def delta_rule(call: DeltaRuleCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state in fp32, None unless asked for.

    Args:
        tensors: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu = tensors
    options = common_options(call, initial_state, cu_seqlens) | {"use_qk_l2norm_in_kernel": call.qk_l2norm}
    if not call.goes_by_token():
        options |= {"cu_seqlens_cpu": cu_seqlens_cpu, "chunk_size": call.chunk_size}
    op = _op(call)
    if call.gate == "none":
        return call_fla(op, call.device, q, k, v, beta, **options)
    options |= {
        "use_beta_sigmoid_in_kernel": call.beta_sigmoid,
        "allow_neg_eigval": call.neg_eigval,
        "state_v_first": call.state_v_first,
    }
    if call.gate == "raw":
        options |= {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias}
    return call_fla(op, call.device, q, k, v, g=g, beta=beta, **options)


def _op(call: DeltaRuleCall) -> str:
    """The name of fla's function."""
    rule = "delta_rule" if call.gate == "none" else "gated_delta_rule"
    return f"fused_recurrent_{rule}" if call.goes_by_token() else f"chunk_{rule}"
