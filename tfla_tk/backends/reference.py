"""The reference as a backend: pure PyTorch, plain autograd, any device and floating dtype, any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

import tfla_tk.reference as forms
from tfla_tk import packed_ops, step_ops
from tfla_tk.calls.mlstm import MLSTMCall
from tfla_tk.core.checks import fail
from tfla_tk.core.layout import state_dtype
from tfla_tk.core.support import SUPPORTED, Support

VARIANTS = ("chunkwise", "parallel", "recurrent")

_MLSTM = {
    "chunkwise": forms.mlstm_chunkwise,
    "parallel": forms.mlstm_parallel,
    "recurrent": forms.mlstm_recurrent,
}
_MLSTM_SIGING = {
    "chunkwise": forms.mlstm_siging_chunkwise,
    "parallel": forms.mlstm_siging_parallel,
    "recurrent": forms.mlstm_siging_recurrent,
}


def supports_mlstm(call: MLSTMCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant that is none of VARIANTS."""
    if variant is not None and variant not in VARIANTS:
        fail("backend", " or ".join(f"'reference:{name}'" for name in VARIANTS), repr(f"reference:{variant}"))
    return SUPPORTED


def mlstm(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h [B, NH, S, V] and the last state, (c, n, m) or with the sigmoid gate (c, n).

    Args:
        tensors: q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens.
    """
    form = variant or "chunkwise"
    cu_seqlens = tensors[-1]
    if cu_seqlens is not None and (torch.compiler.is_compiling() or is_fake(cu_seqlens)):
        h, last = packed_ops.packed_mlstm(call, form, tensors)
    else:
        h, last = apply(
            tensors,
            form=form,
            chunk_size=call.chunk_size,
            sigmoid_gate=call.sigmoid_gate,
            normalize=call.normalize,
            eps=call.eps,
        )
    # computed in the widest dtype of the inputs
    dtype = state_dtype(tensors[0])
    return h, tuple(x if x.dtype == dtype else x.to(dtype) for x in last)


def apply(
    tensors: tuple[Any, ...], *, form: str, chunk_size: int, sigmoid_gate: bool, normalize: bool, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One form of the reference; arguments and result as of `mlstm`, without its description of the call.

    Args:
        tensors: q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens. form: one of VARIANTS.
    """
    q, k, v, i, f, c_initial, n_initial, m_initial, cu_seqlens = tensors
    options: dict[str, Any] = {"return_last_states": True, "eps": eps, "cu_seqlens": cu_seqlens}
    if form == "chunkwise":
        options["chunk_size"] = chunk_size
    if sigmoid_gate:
        options["normalize"] = normalize
        h, last = _MLSTM_SIGING[form](q, k, v, i, f, c_initial, n_initial, **options)
    else:
        h, last = _MLSTM[form](q, k, v, i, f, c_initial, n_initial, m_initial, **options)
    return h, last


def supports_mlstm_step(call: MLSTMCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant: the step has one form."""
    if variant is not None:
        fail("backend", "'reference' for a step", repr(f"reference:{variant}"))
    return SUPPORTED


def supports_mlstm_sequence(call: MLSTMCall, variant: str | None = None) -> Support:
    """Everything is supported; ValueError for a variant: a few tokens are the recurrence."""
    if variant is not None:
        fail("backend", "'reference' for a few tokens", repr(f"reference:{variant}"))
    return SUPPORTED


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    *,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One token, q [B, NH, K], or several, q [B, NH, S, K], from a state on; m is None with the sigmoid gate.

    Returns:
        h like v, and the last state, (c, n, m) or with the sigmoid gate (c, n), of at least fp32; n itself
        without normaliser.
    """
    one_token = q.dim() == 3
    if m is None and one_token:
        return forms.mlstm_siging_step(q, k, v, i, f, c, n, eps=eps, normalize=normalize)
    if m is None:
        h, (c, n_last) = forms.mlstm_siging_recurrent(
            q, k, v, i, f, c, n, return_last_states=True, eps=eps, normalize=normalize
        )
        return h, (c, n_last if normalize else n)
    if one_token:
        return forms.mlstm_step(q, k, v, i, f, c, n, m, eps=eps)
    return forms.mlstm_recurrent(  # type: ignore[return-value]
        q, k, v, i, f, c, n, m, return_last_states=True, eps=eps
    )


def mlstm_step(call: MLSTMCall, variant: str | None, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`decode` of q, k, v, i, f, c, n, m, with the state stored as the call says."""
    q, k, v, i, f, c, n, m = tensors
    m = None if call.sigmoid_gate else m
    h, state = decode(q, k, v, i, f, c, n, m, normalize=call.normalize, eps=call.eps)
    return h, step_ops.stored(call, state, tensors[5:])


mlstm_sequence = mlstm_step
