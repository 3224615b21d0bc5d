"""The reference as a backend: pure PyTorch, plain autograd, any device and floating dtype, any shape."""

from functools import partial
from typing import Any

from torch import Tensor

from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail, shown_name
from tfla_tk.core.layout import FORMS, state_dtype
from tfla_tk.core.memo import has_no_values
from tfla_tk.core.support import SUPPORTED, Support
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import mlstm as ops
from tfla_tk.ops import mlstm_decode
from tfla_tk.ops import simple_gla as simple_gla_ops

simple_gla = simple_gla_ops.ops.serve_by_reference
delta_rule = delta_rule_ops.ops.serve_by_reference
gla = simple_gla_ops.gla.serve_by_reference
kda = delta_rule_ops.kda.serve_by_reference


def supports_form(call: object, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is no form."""
    if variant is not None and variant not in FORMS:
        known = [f"reference:{name}" for name in FORMS]
        fail("backend", " or ".join(map(repr, known)), shown_name(f"reference:{variant}", known))
    return SUPPORTED


supports_simple_gla = supports_delta_rule = supports_gla = supports_kda = supports_form
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
        h, last = ops.by_reference(tensors, form, call.chunk_size, *options)
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
    """`mlstm_decode.by_reference` of q, k, v, i, f, c, n, m, with the state stored as the call says."""
    *others, m = tensors
    read = *others, None if call.sigmoid_gate else m
    h, state = mlstm_decode.by_reference(read, call.normalize, call.eps)
    return h, mlstm_decode.stored(call, state, tensors[5:])


mlstm_sequence = mlstm_step
