"""The registered ops of linear attention with a scalar decay: simple GLA, RetNet, Lightning, Mamba-2's SSD.

They are those of `ops.linear`, of one signature for all public functions. g is [B, T, HV]: a decay per head
comes with strides of zero along B and T. The kernels take it as [HV]. tfla_tk::simple_gla_bwd also takes
final_state where dht is given and needs_gates.

Those of gated linear attention are beside them: tfla_tk::gla_fwd takes a `GLACore` and output_final_state;
the reference takes a decay per token, head and key channel as g, too."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfla_tk.calls.linear import GLACore, LinearCall, SimpleGLACore
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor, state_dtype
from tfla_tk.ops.linear import Family, LinearOps, Result, explicit_gradients, in_form


def _core(call: LinearCall, tensors: Sequence[Any]) -> SimpleGLACore:
    """With g, or a decay per head, which is fp32 at least, or fp64 beside fp64."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    if g_gamma is not None:
        g, dtype = g_gamma, state_dtype(q)
        g = g.to(dtype) if g.dtype.itemsize < dtype.itemsize else g
    return SimpleGLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _op_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """With a decay per head [HV] as [B, T, HV]."""
    q, k, v, g, *others = inputs
    return q, k, v, g if g is None or g.dim() > 1 else g.expand(v.shape[:3]), *others


def _in_form(core: SimpleGLACore, *options: Any) -> Result:
    is_per_head = core.g is not None and core.g.dim() == 1
    gates = (None, core.g) if is_per_head else (core.g, None)
    return in_form("simple_gla", (*core[:3], *gates), core, *options)


def _gradients(core: SimpleGLACore, *grads: Any) -> Sequence[MaybeTensor]:
    *found, dh0 = explicit_gradients("simple_gla", _op_inputs(core[:4]), core, *grads)
    return *found, None if core.initial_state is None else dh0


def _kernels() -> Any:
    from tfla_tk.backends.tk.scalar_gate import scalar_decay

    return scalar_decay


ops = LinearOps(
    Family(
        name="simple_gla",
        title="simple GLA",
        inputs=("q", "k", "v", "g?", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 1, 0),
        options=("float scale", "bool batch_invariant"),
        gates=("g",),
        core=SimpleGLACore,
        read=_core,
        reference=_in_form,
        gradients=_gradients,
        kernels=_kernels,
        flops=(flops.forward, flops.backward),
        saves_final_state=True,
        places=lambda tensors: (0, 1, 2, 4 if tensors[3] is None else 3, 5, 6),
        op_inputs=_op_inputs,
    )
)


def _gla_core(call: LinearCall, tensors: Sequence[Any]) -> GLACore:
    q, k, v, g, initial_state, cu_seqlens, _ = tensors
    return GLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _gla_kernels() -> Any:
    from tfla_tk.backends.tk.channel_gate import launch

    return launch


gla = LinearOps(
    replace(
        ops.family,
        name="gla",
        title="GLA",
        inputs=("q", "k", "v", "g", "initial_state?", "cu_seqlens?"),
        core=GLACore,
        read=_gla_core,
        kernels=_gla_kernels,
        flops=(flops.forward, flops.gla_backward),
        saves_final_state=False,
        places=None,
        op_inputs=None,
    )
)
