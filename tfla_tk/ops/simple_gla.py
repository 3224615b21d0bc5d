"""The registered ops of linear attention with a scalar decay: simple GLA, RetNet, Lightning, Mamba-2's SSD.

They are those of `ops.linear`, of one signature for all public functions. g is [B, T, HV]: a decay per head
comes with strides of zero along B and T. The kernels take it as [HV]. tfla_tk::simple_gla_bwd also takes
final_state where dht is given and needs_gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tfla_tk.calls.linear import LinearCall, SimpleGLACore
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor, as_dtype, state_dtype
from tfla_tk.ops.linear import Family, LinearOps, Result


def simple_gla(call: LinearCall, tensors: Sequence[Any]) -> Result:
    """The tk backend: tfla_tk::simple_gla_fwd.

    Args:
        tensors: q, k, v, g, g_gamma, initial_state, cu_seqlens, cu_seqlens_cpu.

    Returns:
        (o, final state or None), the state as the call wants it.
    """
    return _ops.serve(call, _read(call, tensors))


def prepare_simple_gla(call: LinearCall, tensors: Sequence[Any]) -> Callable[..., Result]:
    """`simple_gla` without the op: the kernels themselves, for plain eager calls with tensors like these.

    Like these are tensors with the same metadata, strides included, that autograd records or not as these.
    """
    g = 4 if tensors[3] is None else 3
    return _ops.prepare(call, lambda *tensors: _read(call, tensors), tensors, places=(0, 1, 2, g, 5, 6))


def packed_simple_gla(call: LinearCall, form: str, tensors: Sequence[Any]) -> Result:
    """tfla_tk::packed_simple_gla; tensors and result as of `simple_gla`."""
    return _ops.serve_packed(call, _read(call, tensors), form)


def reference(call: LinearCall, form: str, tensors: Sequence[Any]) -> Result:
    """A form of the reference in plain autograd; tensors and result as of `simple_gla`."""
    return _ops.serve_reference(call, _core(call, tensors), form)


def _core(call: LinearCall, tensors: Sequence[Any]) -> SimpleGLACore:
    """The core of a call's tensors in the dtypes that they have."""
    q, k, v, g, g_gamma, initial_state, cu_seqlens, _ = tensors
    if initial_state is not None and call.state_v_first:
        initial_state = initial_state.mT
    g = g_gamma if g is None else g
    return SimpleGLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


def _read(call: LinearCall, tensors: Sequence[Any]) -> SimpleGLACore:
    """The core as the kernels take it: a decay per head is fp32, or fp64 beside fp64."""
    core: SimpleGLACore = _ops.as_read(_core(call, tensors))
    if core.g is None or core.g.dim() == 3:
        return core
    return core._replace(g=as_dtype(core.g, state_dtype(core.q)))


def _op_inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """With a decay per head [HV] as [B, T, HV]."""
    q, k, v, g, *others = inputs
    return q, k, v, _of_tokens(g, v), *others


def _of_tokens(g: MaybeTensor, v: Tensor) -> MaybeTensor:
    return g if g is None or g.dim() == 3 else g.expand(v.shape[:3])


# The reference


def _in_form(core: SimpleGLACore, form: str, chunk_size: int, output_final_state: bool) -> Result:
    import tfla_tk.reference as forms

    is_per_head = core.g is not None and core.g.dim() == 1
    options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
    result: Result = getattr(forms, f"simple_gla_{form}")(
        core.q,
        core.k,
        core.v,
        None if is_per_head else core.g,
        core.g if is_per_head else None,
        scale=core.scale,
        initial_state=core.initial_state,
        output_final_state=output_final_state,
        cu_seqlens=core.cu_seqlens,
        **options,
    )
    return result


def _gradients(core: SimpleGLACore, do: Any, dht: Any, chunk_size: int) -> Sequence[MaybeTensor]:
    import tfla_tk.reference as forms

    dq, dk, dv, dg, dh0 = forms.simple_gla_backward(
        core.q,
        core.k,
        core.v,
        _of_tokens(core.g, core.v),
        do,
        dht,
        scale=core.scale,
        initial_state=core.initial_state,
        cu_seqlens=core.cu_seqlens,
        chunk_size=chunk_size,
    )
    return dq, dk, dv, dg, dh0


def _kernels() -> Any:
    from tfla_tk.backends.tk.scalar_gate import scalar_decay

    return scalar_decay


_ops = LinearOps(
    Family(
        name="simple_gla",
        title="simple GLA",
        inputs=("q", "k", "v", "g?", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 1, 0),
        options=("float scale", "bool batch_invariant"),
        gates=("g",),
        core=SimpleGLACore,
        reference=_in_form,
        gradients=_gradients,
        kernels=_kernels,
        flops=(flops.forward, flops.backward),
        saves_final_state=True,
        op_inputs=_op_inputs,
    )
)
