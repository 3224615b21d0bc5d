"""The registered ops of gated linear attention (a decay per token, head and key channel); see `ops.linear`.

tfla_tk::gla_fwd takes a `GLACore` and output_final_state.
"""

from collections.abc import Sequence
from typing import Any

from tfla_tk.calls.linear import GLACore, LinearCall
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.ops.linear import Family, LinearOps, Result, explicit_gradients, in_form


def _core(call: LinearCall, tensors: Sequence[Any]) -> GLACore:
    q, k, v, g, initial_state, cu_seqlens, _ = tensors
    return GLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _in_form(core: GLACore, *options: Any) -> Result:
    return in_form("gla", core[:4], core, *options)


def _gradients(core: GLACore, *grads: Any) -> Sequence[MaybeTensor]:
    *found, dh0 = explicit_gradients("gla", core[:4], core, *grads)
    return *found, None if core.initial_state is None else dh0


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
