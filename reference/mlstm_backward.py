"""Explicit backward formulas of mLSTMexp and mLSTMsig, chunk by chunk.

With s = K^-1/2, R_t = s e^{b_t + m_in - m_t}, and W, w^end of :class:`~.mlstm_forward.MLSTMChunk`::

    dnum_t = dh_t / w_t             dd_t = -(dh_t.h_t) / w_t * sign(d_t) * [|d_t| > floor_t]
    dS    = s W . (dnum V^T + dd 1^T)
    dq    = dS K + R . (dnum C_in^T + dd n_in^T)
    dk    = dS^T Q + w^end . (V dC_out^T + 1 dn_out^T)
    dv    = (s W . Q K^T)^T dnum + w^end . (K dC_out)
    dC_in = (R . Q)^T dnum + e^{b_L + m_in - m_out} dC_out
    dn_in = (R . Q)^T dd   + e^{b_L + m_in - m_out} dn_out
    di_t  = k_t.dk_t                                        (times sigmoid(-i_t) for the sigmoid gate)
    df_t  = sigmoid(-f_t) dlf_t

dlf_t is the flow of gradient over the boundary before token t: from C_in and n_in to tokens u >= t, from
tokens j < t to tokens u >= t, from tokens j < t to dC_out and dn_out, and from state to state::

    dlf_t = sum_{u >= t} q_u.(R . (dnum C_in^T + dd n_in^T))_u + sum_{j < t <= u} dS_uj q_u.k_j
          + sum_{j < t} k_j.(w^end . (V dC_out^T + 1 dn_out^T))_j
          + e^{b_L + m_in - m_out} (<C_in, dC_out> + <n_in, dn_out>)

This is the exact gradient, the stabiliser m being a constant: dm = 0. The sigmoid gate has m = 0; without
normalisation w = 1 and dd = 0. Where the state is empty (m_t = -inf) W, R and w^end are 0 and w is inf: all
terms of such a token are 0.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, einsum
from torch.nn.functional import logsigmoid

from . import common
from .mlstm_forward import MLSTMChunk, first_state, mlstm_chunk


class MLSTMGrads(NamedTuple):
    """Gradients, each with the shape and dtype of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    c_initial: Tensor
    n_initial: Tensor


def _chunk_forward(*args: Tensor, **options: Any) -> tuple[MLSTMChunk, common.States]:
    """One chunk, and the state that leaves it."""
    chunk = mlstm_chunk(*args, **options)
    return chunk, (chunk.c, chunk.n, chunk.m)


def _chunk_backward(forward: MLSTMChunk, *given: Tensor) -> common.States:
    """dq, dk, dv, the gradients of the log gates and those of the incoming C and n, of one chunk, from its
    forward terms, tokens, dh [B, NH, L, V], the incoming state and the gradients of the outgoing C and n."""
    q, k, v, _, _, dh, c, n, _, dc, dn = given
    scale = q.shape[-1] ** -0.5
    gates, w_end = forward.gates, forward.gates[..., -1, :, None]
    r = scale * forward.inter[..., None]
    decay = forward.inter[..., -1:]
    # through h = num / w
    dnum = dh / forward.w[..., None]
    slope = torch.where(forward.d.abs() > forward.floor, forward.d.sign(), 0.0)
    dd = -(dh * forward.h).sum(-1) / forward.w * slope
    # inside the chunk
    products = einsum("bhtk,bhjk->bhtj", q, k)
    scores = scale * gates * products
    ds = scale * gates * (einsum("bhtv,bhjv->bhtj", dnum, v) + dd[..., None])
    # through the states
    dq_inter = r * (einsum("bhtv,bhkv->bhtk", dnum, c) + dd[..., None] * n[..., None, :])
    dk_inter = w_end * (einsum("bhjv,bhkv->bhjk", v, dc) + dn[..., None, :])
    dk = einsum("bhtj,bhtk->bhjk", ds, q) + dk_inter
    dlog_f = common.log_decay_gradient(
        ds * products,
        (q * dq_inter).sum(-1),
        (k * dk_inter).sum(-1),
        (decay[..., None] * c * dc).sum((-1, -2)) + (decay * n * dn).sum(-1),
    )
    return (
        einsum("bhtj,bhjk->bhtk", ds, k) + dq_inter,
        dk,
        einsum("bhtj,bhtv->bhjv", scores, dnum) + w_end * einsum("bhjk,bhkv->bhjv", k, dc),
        (k * dk).sum(-1),
        dlog_f,
        einsum("bhtk,bhtv->bhkv", r * q, dnum) + decay[..., None] * dc,
        einsum("bhtk,bht->bhk", r * q, dd) + decay * dn,
    )


@common.full_precision
def mlstm_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    m_initial: Tensor | None,
    dh: Tensor,
    dc_last: Tensor | None = None,
    dn_last: Tensor | None = None,
    eps: float = 1e-6,
    chunk_size: int = 64,
    *,
    sigmoid_gate: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> MLSTMGrads:
    """Exact gradients of mLSTM by the explicit formulas.

    Args:
        dh: [B, NH, S, V] gradient of h.
        dc_last: [N, NH, K, V]. dn_last: [N, NH, K]. Gradients of the last state; None is zero.
        sigmoid_gate: mLSTMsig instead of mLSTMexp, which does not use m_initial.
        normalize: as in mLSTMsig; False ignores n_initial and dn_last.
        others: as of :func:`~.mlstm.mlstm_chunkwise`; the result does not depend on ``chunk_size``.
    """
    tokens = (q, k, v, i, f)
    c, n, m = first_state(tokens, (c_initial, n_initial, m_initial), cu_seqlens, sigmoid_gate, normalize)
    dc = torch.zeros_like(c) if dc_last is None else dc_last
    dn = torch.zeros_like(n) if dn_last is None or not normalize else dn_last
    *operands, wide_i, wide_f, wide_dh, wide_c, wide_n, wide_m, dc, dn = common.promote(
        *tokens, dh, c, n, m, dc, dn
    )
    gates = (logsigmoid(wide_i) if sigmoid_gate else wide_i), logsigmoid(wide_f)
    options = {"stabilise": not sigmoid_gate, "normalize": normalize, "eps": eps}
    form = common.BackwardForm(partial(_chunk_forward, **options), _chunk_backward)
    states = (wide_c, wide_n, wide_m, dc, dn)
    sequences = common.split_sequences((*operands, *gates, wide_dh), states, cu_seqlens)
    parts = [
        common.sequence_backward(form, chunk_size, own, state[:3], state[3:]) for own, state in sequences
    ]
    dq, dk, dv, di, df, dc, dn = common.join_sequences(parts, len(tokens))
    di = di * torch.sigmoid(-wide_i) if sigmoid_gate else di
    grads = dq, dk, dv, di, df * torch.sigmoid(-wide_f), dc, dn
    return MLSTMGrads(*(g.to(x.dtype) for g, x in zip(grads, (*tokens, c, n), strict=True)))


def mlstm_siging_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None,
    n_initial: Tensor | None,
    dh: Tensor,
    dc_last: Tensor | None = None,
    dn_last: Tensor | None = None,
    eps: float = 1e-6,
    normalize: bool = True,
    chunk_size: int = 64,
    *,
    cu_seqlens: Tensor | None = None,
) -> MLSTMGrads:
    """Exact gradients of mLSTMsig by the explicit formulas; arguments as in :func:`mlstm_backward`."""
    return mlstm_backward(
        q, k, v, i, f, c_initial, n_initial, None, dh, dc_last, dn_last, eps, chunk_size,
        sigmoid_gate=True, normalize=normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
