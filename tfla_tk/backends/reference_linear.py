"""The reference as a backend of the operators in [B, T, H, D]: any device and floating dtype, any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

import tfla_tk.reference as forms
from tfla_tk import simple_gla_ops
from tfla_tk.backends.reference import VARIANTS
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import MaybeTensor, as_dtype, state_dtype
from tfla_tk.core.support import SUPPORTED, Support

_SIMPLE_GLA = {
    "chunkwise": forms.simple_gla_chunkwise,
    "parallel": forms.simple_gla_parallel,
    "recurrent": forms.simple_gla_recurrent,
}


def supports_simple_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is none of VARIANTS."""
    if variant is not None and variant not in VARIANTS:
        fail("backend", " or ".join(f"'reference:{name}'" for name in VARIANTS), repr(f"reference:{variant}"))
    return SUPPORTED


def simple_gla(call: LinearCall, variant: str | None, *tensors: Any) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, HV, V] and the final state, None unless asked for.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.
    """
    form = variant or "chunkwise"
    q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu = tensors
    if cu_seqlens is not None and (torch.compiler.is_compiling() or is_fake(cu_seqlens)):
        return simple_gla_ops.packed_simple_gla(call, form, *tensors)
    options: dict[str, Any] = {"chunk_size": call.chunk_size} if form == "chunkwise" else {}
    o, last = _SIMPLE_GLA[form](
        q,
        k,
        v,
        g,
        g_gamma,
        scale=call.scale,
        initial_state=initial_state,
        output_final_state=call.output_final_state,
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        state_v_first=call.state_v_first,
        **options,
    )
    # computed in the widest dtype of the inputs
    return o, as_dtype(last, state_dtype(q))
