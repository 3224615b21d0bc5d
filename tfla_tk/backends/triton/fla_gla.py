"""The adapter onto fla's chunk_gla."""

from __future__ import annotations

from torch import Tensor

from tfla_tk.backends.triton.fla import (
    FLA_OPS,
    call_fla,
    common_options,
    refusal_of_call,
    too_many_heads,
    verdict_on_gradients,
)
from tfla_tk.backends.triton.installation import load_module
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.core.support import Support

_OP = "chunk_gla"


def supports_gla(call: LinearCall, variant: str | None = None) -> Support:
    """Whether fla serves the call correctly; ValueError for a variant but "fla"."""
    refusal = refusal_of_call(_OP, call, variant) or too_many_heads(call)
    return refusal or verdict_on_gradients(call, gated=False)


def load(kernel: str, call: LinearCall, variant: str | None = None) -> Support:
    """Import what serves a call that is supported."""
    return load_module(FLA_OPS[_OP])


def gla(
    call: LinearCall,
    variant: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: MaybeTensor,
    cu_seqlens: MaybeTensor,
    cu_seqlens_cpu: MaybeTensor,
) -> tuple[Tensor, MaybeTensor]:
    """o [B, T, H, V] and the final state in fp32, None unless asked for."""
    options = common_options(call, initial_state, cu_seqlens) | {"state_v_first": call.state_v_first}
    if call.goes_by_token():
        return call_fla("fused_recurrent_gla", call.device, q, k, v, g, **options)
    return call_fla(_OP, call.device, q, k, v, g, cu_seqlens_cpu=cu_seqlens_cpu, **options)
