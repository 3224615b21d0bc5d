"""Explicit backward formulas of mLSTMexp and mLSTMsig, chunk by chunk, with every term in the open.

With s = K^-1/2, R_t = s e^{b_t + m_in - m_t}, and W, w^end of :class:`~.mlstm_chunk.MLSTMChunk`::

    dnum_t = dh_t / w_t             dd_t = -(dh_t.h_t) / w_t * sign(d_t) * [|d_t| > floor_t]
    dS    = s W . (dnum V^T + dd 1^T)
    dq    = dS K + R . (dnum C_in^T + dd n_in^T)
    dk    = dS^T Q + w^end . (V dC_out^T + 1 dn_out^T)
    dv    = (s W . Q K^T)^T dnum + w^end . (K dC_out)
    dC_in = (R . Q)^T dnum + e^{b_L + m_in - m_out} dC_out
    dn_in = (R . Q)^T dd   + e^{b_L + m_in - m_out} dn_out
    di_t  = k_t.dk_t                                        (times sigmoid(-i_t) for the sigmoid gate)
    dlf_t = sum_{u >= t} (q_u.dq_u - k_u.dk_u) + <dC_T, C_T> + <dn_T, n_T>        df_t = dlf_t sigmoid(-f_t)

This is the exact gradient, the stabiliser m being a constant: dm = 0. The sigmoid gate has m = 0; without
normalisation w = 1 and dd = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, einsum
from torch.nn.functional import logsigmoid

from .common import full_precision, promote
from .mlstm import initial_state
from .mlstm_chunk import MLSTMChunk, mlstm_chunk
from .mlstm_siging import siging_initial_state


class MLSTMGrads(NamedTuple):
    """Gradients, each with the shape and dtype of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    c_initial: Tensor
    n_initial: Tensor


class MLSTMChunkGrads(NamedTuple):
    """Backward terms of one chunk of L tokens; shapes without the leading [B, NH]."""

    dnum: Tensor  #: [L, V] gradient of the numerator
    dd: Tensor  #: [L] gradient of s q_t.n_t
    ds: Tensor  #: [L, L] gradient of Q K^T, gate and scale included
    dq: Tensor  #: [L, K]
    dk: Tensor  #: [L, K]
    dv: Tensor  #: [L, V]
    dc: Tensor  #: [K, V] gradient of the incoming C
    dn: Tensor  #: [K] gradient of the incoming n


class MLSTMBackward(NamedTuple):
    """Gradients with the terms they were computed from, in the compute dtype."""

    grads: MLSTMGrads
    forward: list[MLSTMChunk]  #: per chunk, first to last
    backward: list[MLSTMChunkGrads]  #: per chunk, first to last
    q_dq: Tensor  #: [B, NH, S] q_t.dq_t
    k_dk: Tensor  #: [B, NH, S] k_t.dk_t
    state_term: Tensor  #: [B, NH, 1] <dC_T, C_T> + <dn_T, n_T>
    dlog_f: Tensor  #: [B, NH, S] gradient of logsigmoid(f)


def mlstm_chunk_backward(
    forward: MLSTMChunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    n: Tensor,
    dh: Tensor,
    dc: Tensor,
    dn: Tensor,
) -> MLSTMChunkGrads:
    """Backward of :func:`~.mlstm_chunk.mlstm_chunk` from its own result.

    Args:
        forward: the chunk's forward terms.
        q, k: [B, NH, L, K]. v: [B, NH, L, V].
        c: [B, NH, K, V]. n: [B, NH, K]. Incoming state.
        dh: [B, NH, L, V]. dc: [B, NH, K, V]. dn: [B, NH, K]. Gradients of h and of the outgoing state.
    """
    scale = q.shape[-1] ** -0.5
    gates, w_end = forward.gates, forward.gates[..., -1, :, None]
    r = scale * forward.inter[..., None]
    decay = forward.inter[..., -1:]
    # through h = num / w
    dnum = dh / forward.w[..., None]
    slope = torch.where(forward.d.abs() > forward.floor, forward.d.sign(), 0.0)
    dd = -(dh * forward.h).sum(-1) / forward.w * slope
    # inside the chunk
    scores = scale * gates * einsum("bhtk,bhjk->bhtj", q, k)
    ds = scale * gates * (einsum("bhtv,bhjv->bhtj", dnum, v) + dd[..., None])
    # through the states
    dq_inter = r * (einsum("bhtv,bhkv->bhtk", dnum, c) + dd[..., None] * n[..., None, :])
    dk_inter = w_end * (einsum("bhjv,bhkv->bhjk", v, dc) + dn[..., None, :])
    return MLSTMChunkGrads(
        dnum=dnum,
        dd=dd,
        ds=ds,
        dq=einsum("bhtj,bhjk->bhtk", ds, k) + dq_inter,
        dk=einsum("bhtj,bhtk->bhjk", ds, q) + dk_inter,
        dv=einsum("bhtj,bhtv->bhjv", scores, dnum) + w_end * einsum("bhjk,bhkv->bhjv", k, dc),
        dc=einsum("bhtk,bhtv->bhkv", r * q, dnum) + decay[..., None] * dc,
        dn=einsum("bhtk,bht->bhk", r * q, dd) + decay * dn,
    )


@full_precision
def mlstm_backward_terms(
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
) -> MLSTMBackward:
    """Backward of mLSTM with all of its terms.

    Args:
        q, k: [B, NH, S, K]. v: [B, NH, S, V]. i, f: [B, NH, S] pre-activations. S >= 1.
        c_initial: [B, NH, K, V]. n_initial: [B, NH, K]. m_initial: [B, NH, 1], not used by the sigmoid gate.
        dh: [B, NH, S, V] gradient of h.
        dc_last: [B, NH, K, V]. dn_last: [B, NH, K]. Gradients of the last state; None is zero.
        eps, chunk_size: as in the forward; the result does not depend on ``chunk_size``.
        sigmoid_gate: mLSTMsig instead of mLSTMexp.
        normalize: as in mLSTMsig; False ignores n_initial and dn_last.
    """
    tokens = (q, k, v, i, f)
    if sigmoid_gate:
        c, n = siging_initial_state(tokens, c_initial, n_initial, q.shape[0], normalize)
        m = torch.zeros_like(n[..., :1])
    else:
        c, n, m = initial_state(tokens, (c_initial, n_initial, m_initial), q.shape[0])
    dc = torch.zeros_like(c) if dc_last is None else dc_last
    dn = torch.zeros_like(n) if dn_last is None or not normalize else dn_last
    inputs = (*tokens, c, n)
    q, k, v, i, f, c, n, m, dh, dc, dn = promote(q, k, v, i, f, c, n, m, dh, dc, dn)
    log_i, log_f = (logsigmoid(i) if sigmoid_gate else i), logsigmoid(f)

    # forward in time
    pieces = list(zip(*(x.split(chunk_size, dim=2) for x in (q, k, v, log_i, log_f, dh)), strict=True))
    states, forward = [(c, n, m)], []
    for q_c, k_c, v_c, log_i_c, log_f_c, _ in pieces:
        out = mlstm_chunk(
            q_c, k_c, v_c, log_i_c, log_f_c, *states[-1],
            stabilise=not sigmoid_gate, normalize=normalize, eps=eps,
        )  # fmt: skip
        forward.append(out)
        states.append((out.c, out.n, out.m))

    # backward in time
    c_last, n_last, _ = states.pop()
    state_term = ((dc * c_last).sum((-1, -2)) + (dn * n_last).sum(-1))[..., None]
    backward: list[MLSTMChunkGrads] = []
    for (q_c, k_c, v_c, _, _, dh_c), (c_in, n_in, _), out in zip(
        reversed(pieces), reversed(states), reversed(forward), strict=True
    ):
        back = mlstm_chunk_backward(out, q_c, k_c, v_c, c_in, n_in, dh_c, dc, dn)
        backward.insert(0, back)
        dc, dn = back.dc, back.dn

    # gates
    dq = torch.cat([chunk.dq for chunk in backward], dim=2)
    dk = torch.cat([chunk.dk for chunk in backward], dim=2)
    dv = torch.cat([chunk.dv for chunk in backward], dim=2)
    q_dq, k_dk = (q * dq).sum(-1), (k * dk).sum(-1)
    dlog_f = (q_dq - k_dk).flip(-1).cumsum(-1).flip(-1) + state_term
    di = k_dk * torch.sigmoid(-i) if sigmoid_gate else k_dk
    df = dlog_f * torch.sigmoid(-f)

    grads = MLSTMGrads(*(g.to(x.dtype) for g, x in zip((dq, dk, dv, di, df, dc, dn), inputs, strict=True)))
    return MLSTMBackward(grads, forward, backward, q_dq, k_dk, state_term, dlog_f)


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
) -> MLSTMGrads:
    """Exact gradients of mLSTMexp by the explicit formulas; arguments as in :func:`mlstm_backward_terms`."""
    return mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, dh, dc_last, dn_last, eps, chunk_size
    ).grads


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
) -> MLSTMGrads:
    """Exact gradients of mLSTMsig by the explicit formulas; arguments as in :func:`mlstm_backward_terms`."""
    return mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, None, dh, dc_last, dn_last, eps, chunk_size,
        sigmoid_gate=True, normalize=normalize,
    ).grads  # fmt: skip
