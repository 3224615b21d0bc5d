"""The registered ops of gated linear attention (a decay per token, head and key channel); see `ops.linear`.

tfla_tk::gla_fwd takes a `GLACore` and output_final_state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfla_tk.calls.gla import GLACore
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.ops.linear import Family, LinearOps, Result


def _core(call: LinearCall, tensors: Sequence[Any]) -> GLACore:
    return GLACore(*tensors[:6], call.scale, call.batch_invariant)


def _in_form(core: GLACore, form: str, chunk_size: int, output_final_state: bool) -> Result:
    import tfla_tk.reference as forms

    options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
    result: Result = getattr(forms, f"gla_{form}")(
        core.q,
        core.k,
        core.v,
        core.g,
        scale=core.scale,
        initial_state=core.initial_state,
        output_final_state=output_final_state,
        cu_seqlens=core.cu_seqlens,
        **options,
    )
    return result


def _gradients(core: GLACore, do: Any, dht: Any, chunk_size: int) -> Sequence[MaybeTensor]:
    import tfla_tk.reference as forms

    dq, dk, dv, dg, dh0 = forms.gla_backward(
        core.q,
        core.k,
        core.v,
        core.g,
        do,
        dht,
        scale=core.scale,
        initial_state=core.initial_state,
        cu_seqlens=core.cu_seqlens,
        chunk_size=chunk_size,
    )
    return dq, dk, dv, dg, None if core.initial_state is None else dh0


def _kernels() -> Any:
    from tfla_tk.backends.tk.channel_gate import launch

    return launch


ops = LinearOps(
    Family(
        name="gla",
        title="GLA",
        inputs=("q", "k", "v", "g", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 1, 0),
        options=("float scale", "bool batch_invariant"),
        gates=("g",),
        core=GLACore,
        read=_core,
        reference=_in_form,
        gradients=_gradients,
        kernels=_kernels,
        flops=(flops.forward, flops.gla_backward),
    )
)
