"""The registered ops of the reference over packed sequences, for traced calls.

The reference reads cu_seqlens on the host. torch.compile, torch.export and fake tensors have no values to
read, so they call these ops, which read them when they run. Eager calls do not come here.

tfla_tk::packed_mlstm takes the inputs of `mlstm_chunkwise` with cu_seqlens [N + 1], the form of the reference
    ("chunkwise", "parallel" or "recurrent") and its chunk_size. It returns (h, c, n, m): h [1, NH, S, V] in
    q's dtype, and the last states [N, NH, K, V], [N, NH, K], [N, NH, 1] in the common dtype of the inputs, at
    least fp32; m is an empty tensor [0] with the sigmoid gate. m has no gradient.
tfla_tk::packed_mlstm_bwd takes the same inputs and the gradients of h, c and n (None for zero), and returns
    (dq, dk, dv, di, df, dc_initial, dn_initial) by the explicit formulas, each like its input; the last two
    are empty tensors [0] where no initial state was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tfla_tk.calls.mlstm import Grads, MLSTMCall
from tfla_tk.core import flops, library, transforms
from tfla_tk.core.layout import MaybeTensor, grads_like
from tfla_tk.ops import autograd
from tfla_tk.ops.autograd import Recorded
from tfla_tk.ops.mlstm import present_grads

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, "
    "Tensor? c_initial, Tensor? n_initial, Tensor? m_initial, Tensor cu_seqlens, "
)
_OPTIONS = "str form, int chunk_size, bool sigmoid_gate, bool normalize, float eps"
_library = library.get()
_library.define(
    f"packed_mlstm({_INPUTS}{_OPTIONS}) -> (Tensor h, Tensor c_last, Tensor n_last, Tensor m_last)"
)
_library.define(
    f"packed_mlstm_bwd({_INPUTS}Tensor? dh, Tensor? dc_last, Tensor? dn_last, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor di, Tensor df, Tensor dc_initial, Tensor dn_initial)"
)
_packed = torch.ops.tfla_tk.packed_mlstm.default
_packed_bwd = torch.ops.tfla_tk.packed_mlstm_bwd.default

Output = tuple[Tensor, Tensor, Tensor, Tensor]


def packed_mlstm(call: MLSTMCall, form: str, tensors: tuple[Any, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """tfla_tk::packed_mlstm: h and the last state, (c, n, m) or with the sigmoid gate (c, n).

    Args:
        tensors: q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens.
    """
    h, c, n, m = _packed(*tensors, form, call.chunk_size, call.sigmoid_gate, call.normalize, call.eps)
    return h, (c, n) if call.sigmoid_gate else (c, n, m)


def _outputs_like(inputs: tuple[Any, ...], sigmoid_gate: bool) -> Output:
    """Uninitialised outputs of packed_mlstm."""
    from tfla_tk.reference.common import compute_dtype

    q, _, v, *_, cu_seqlens = inputs
    count, (heads, dim_qk), dim_v = cu_seqlens.shape[0] - 1, (q.shape[1], q.shape[3]), v.shape[3]
    dtype = compute_dtype(*inputs[: 7 if sigmoid_gate else 8])

    def empty(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return (
        q.new_empty(v.shape),
        empty(count, heads, dim_qk, dim_v),
        empty(count, heads, dim_qk),
        empty(0) if sigmoid_gate else empty(count, heads, 1),
    )


def _forward(*args: Any) -> Output:
    from tfla_tk.ops import mlstm_reference as reference

    inputs, (form, chunk_size, sigmoid_gate, normalize, eps) = args[:9], args[9:]
    h, last = reference.apply(
        inputs, form=form, chunk_size=chunk_size, sigmoid_gate=sigmoid_gate, normalize=normalize, eps=eps
    )
    out = _outputs_like(inputs, sigmoid_gate)
    # own memory: an op may not return a view of its input
    for buffer, value in zip(out, (h, *last), strict=False):
        buffer.copy_(value)
    return out


def _forward_fake(*args: Any) -> Output:
    return _outputs_like(args[:9], args[11])


def _backward(*args: Any) -> Grads:
    import tfla_tk.reference as forms

    q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens, dh, dc_last, dn_last, *options = args
    _, chunk_size, sigmoid_gate, normalize, eps = options
    dh = torch.zeros_like(v) if dh is None else dh
    terms = forms.mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, dh, dc_last, dn_last, eps, chunk_size,
        sigmoid_gate=sigmoid_gate, normalize=normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out = _backward_fake(*args)
    for buffer, value in zip(out, terms.grads, strict=True):
        if buffer.numel() > 0:
            buffer.copy_(value)
    return out


def _backward_fake(*args: Any) -> Grads:
    return present_grads(grads_like(*args[:7]))


def _record(*args: Any) -> Recorded:
    """packed_mlstm with what its backward op takes; m is a constant of the differentiation."""
    with transforms.below_function():
        out: Output = _packed(*args)
    # a cache of states that is updated in place must not change the gradient
    states = (None if x is None else x.clone() for x in args[5:8])
    return Recorded(out, (out[3],), (*args[:5], *states, args[8]), args[9:])


def _differentiate(
    saved: Sequence[Any], options: tuple[Any, ...], grads: tuple[MaybeTensor, ...]
) -> Sequence[MaybeTensor]:
    found: Grads = _packed_bwd(*saved, *grads[:3], *options)
    return found


_Packed = autograd.function("Packed", _record, _differentiate, once=True)


_library.impl("packed_mlstm", _forward, "CompositeExplicitAutograd")
_library.impl("packed_mlstm_bwd", _backward, "CompositeExplicitAutograd")
_library.impl("packed_mlstm", autograd.recording("packed_mlstm", _packed, _Packed), "Autograd")
_library.register_fake("packed_mlstm", _forward_fake)
_library.register_fake("packed_mlstm_bwd", _backward_fake)
flops.register("packed_mlstm", flops.forward)
flops.register("packed_mlstm_bwd", flops.backward)
