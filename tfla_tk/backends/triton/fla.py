"""Adapters onto fla's operators on tensors [B, T, H, D]."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla_tk.backends.triton.installation import missing, unusable
from tfla_tk.core.errors import UnsupportedError
from tfla_tk.core.support import Support

# public name -> module of fla
FLA_OPS = {
    "chunk_gla": "fla.ops.gla",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_retention": "fla.ops.retention",
    "chunk_lightning_attn": "fla.ops.lightning_attn",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
}

# looked up once at import, so that torch.compile sees a constant
FLA_MISSING = missing("fla", "fla-core")


def supports_fla(op: str, q: Tensor, *, requires_grad: bool = False) -> Support:
    """Whether fla's operator serves a call.

    Args:
        op: one of FLA_OPS.
        q: the queries: their device and dtype decide.
        requires_grad: a gradient will be recorded.
    """
    refusal = unusable(q.device, FLA_MISSING)
    if refusal is not None:
        return refusal
    if q.dtype == torch.float64:
        return Support(False, "Triton kernels have no float64", "use float32 or the reference")
    if op == "chunk_delta_rule" and q.dtype == torch.float32:
        return Support(False, "fla's chunk_delta_rule does not take float32", "use bfloat16 or float16")
    if (
        requires_grad
        and op in ("chunk_simple_gla", "chunk_gated_delta_rule")
        and _gated_backward_is_guarded()
    ):
        return Support(
            False,
            "fla refuses the gated backward on Hopper with triton >= 3.4 and < 3.7.1, which miscompiles it",
            "use triton >= 3.7.1",
        )
    return Support(True)


def fla_op(op: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call fla's operator: tensors [B, T, H, D], initial state cast to fp32.

    Args:
        op: one of FLA_OPS.
        args, kwargs: fla's own arguments of that operator, q first.

    Returns:
        (o [B, T, H, V], final state fp32 [N, H, K, V] or None).

    Raises:
        UnsupportedError: fla cannot serve the call.
    """
    q = args[0] if args else kwargs["q"]
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    support = supports_fla(op, q, requires_grad=requires_grad)
    if not support.ok:
        raise UnsupportedError(f"{op} on backend 'triton'", support.reason, support.remedy)
    state = kwargs.get("initial_state")
    if state is not None:
        kwargs["initial_state"] = state.float()
    function: Callable[..., tuple[Tensor, Tensor | None]] = getattr(importlib.import_module(FLA_OPS[op]), op)
    return function(*args, **kwargs)


def _gated_backward_is_guarded() -> bool:
    """fla's own check, so that a lifted guard counts here too."""
    guard = importlib.import_module("fla.ops.common.chunk_o")
    return bool(guard.IS_NVIDIA_HOPPER and guard.TRITON_ABOVE_3_4_0 and not guard.TRITON_ABOVE_3_7_1)
