"""The reference as a backend: pure PyTorch, plain autograd, any device and floating dtype, any shape."""

from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.backends.reference.linear import supports_form
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import state_dtype
from tfla_tk.core.memo import has_no_values
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import mlstm as ops
from tfla_tk.ops import mlstm_decode
from tfla_tk.ops import mlstm_reference as forms

supports_mlstm = supports_form


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n). tensors: q, k, v, i,
    f, c_initial, n_initial, m_initial, cu_seqlens."""
    form = variant or "chunkwise"
    cu_seqlens = tensors[-1]
    if has_no_values(cu_seqlens):
        h, last = ops.packed_mlstm(call, form, tensors)
    else:
        options = call.sigmoid_gate, call.normalize, call.eps
        h, last = forms.apply(tensors, form, call.chunk_size, *options)
    # computed in the widest dtype of the inputs
    dtype = state_dtype(tensors[0])
    last = tuple(x if x.dtype == dtype else x.to(dtype) for x in last)
    # without a token it may be the initial state itself
    return h, tuple(x.clone() for x in last) if call.seq == 0 else last


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None, what: str = "a step") -> Support:
    """Everything is supported; ValueError for a variant: decoding has one form."""
    if variant is not None:
        fail("backend", f"'reference' for {what}", repr(f"reference:{variant}"))
    return SUPPORTED


supports_mlstm_sequence = partial(supports_mlstm_step, what="a few tokens")


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`mlstm_reference.decode` of q, k, v, i, f, c, n, m, with the state stored as the call says."""
    *others, m = tensors
    read = *others, None if call.sigmoid_gate else m
    h, state = forms.decode(read, call.normalize, call.eps)
    return h, mlstm_decode.stored(call, state, tensors[5:])


mlstm_sequence = mlstm_step
