"""The registered ops of gated linear attention (a decay per token, head and key channel); see `ops.linear`.

tfla_tk::gla_fwd takes a `GLACore` and output_final_state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tfla_tk.calls.gla import GLACore
from tfla_tk.calls.linear import LinearCall
from tfla_tk.core import flops
from tfla_tk.core.layout import MaybeTensor
from tfla_tk.ops.linear import Family, LinearOps, Result

KERNELS = "tfla_tk.backends.tk.channel_gate.launch"  # the module of the kernels


def gla(call: LinearCall, tensors: Sequence[Any]) -> Result:
    """The tk backend: tfla_tk::gla_fwd.

    Args:
        tensors: q, k, v, g, initial_state, cu_seqlens, cu_seqlens_cpu.

    Returns:
        (o, final state or None), the state as the call wants it.
    """
    return _ops.serve(call, _ops.as_read(_core(call, tensors)))


def prepare_gla(call: LinearCall, tensors: Sequence[Any]) -> Callable[..., Result]:
    """`gla` without the op: the kernels themselves, for plain eager calls with tensors like these.

    Like these are tensors with the same metadata, strides included, that autograd records or not as these.
    """
    return _ops.prepare(call, lambda *tensors: _ops.as_read(_core(call, tensors)), tensors)


def packed_gla(call: LinearCall, form: str, tensors: Sequence[Any]) -> Result:
    """tfla_tk::packed_gla; tensors and result as of `gla`."""
    return _ops.serve_packed(call, _core(call, tensors), form)


def reference(call: LinearCall, form: str, tensors: Sequence[Any]) -> Result:
    """A form of the reference in plain autograd; tensors and result as of `gla`."""
    return _ops.serve_reference(call, _core(call, tensors), form)


def _core(call: LinearCall, tensors: Sequence[Any]) -> GLACore:
    """The core of a call's tensors in the dtypes that they have."""
    q, k, v, g, initial_state, cu_seqlens, _ = tensors
    if initial_state is not None and call.state_v_first:
        initial_state = initial_state.mT
    return GLACore(q, k, v, g, initial_state, cu_seqlens, call.scale, call.batch_invariant)


# The reference


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
    return importlib.import_module(KERNELS)


_ops = LinearOps(
    Family(
        name="gla",
        title="GLA",
        inputs=("q", "k", "v", "g", "initial_state?", "cu_seqlens?"),
        heads=(2, 2, 2, 2, 1, 0),
        options=("float scale", "bool batch_invariant"),
        gates=("g",),
        core=GLACore,
        reference=_in_form,
        gradients=_gradients,
        kernels=_kernels,
        flops=(flops.forward, flops.gla_backward),
    )
)
