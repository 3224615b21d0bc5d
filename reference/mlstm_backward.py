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

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from .common import States, full_precision, log_decay_gradient, promote, split_chunks, split_sequences
from .mlstm_chunk import MLSTMChunk
from .mlstm_forward import first_state, scan_mlstm


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
    dlog_f: Tensor  #: [L] gradient of logsigmoid(f)


class MLSTMBackward(NamedTuple):
    """Gradients with the terms they were computed from, in the compute dtype."""

    grads: MLSTMGrads
    forward: list[MLSTMChunk]  #: per chunk, first to last
    backward: list[MLSTMChunkGrads]  #: per chunk, first to last
    k_dk: Tensor  #: [B, NH, S] k_t.dk_t
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
    products = einsum("bhtk,bhjk->bhtj", q, k)
    scores = scale * gates * products
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
        dlog_f=log_decay_gradient(
            ds * products,
            (q * dq_inter).sum(-1),
            (k * dk_inter).sum(-1),
            (decay[..., None] * c * dc).sum((-1, -2)) + (decay * n * dn).sum(-1),
        ),
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
    cu_seqlens: Tensor | None = None,
) -> MLSTMBackward:
    """Backward of mLSTM with all of its terms.

    Args:
        q, k: [B, NH, S, K]. v: [B, NH, S, V]. i, f: [B, NH, S] pre-activations.
        c_initial: [N, NH, K, V]. n_initial: [N, NH, K]. m_initial: [N, NH, 1], not used by the sigmoid gate.
            N is B, or the number of sequences with ``cu_seqlens``.
        dh: [B, NH, S, V] gradient of h.
        dc_last: [N, NH, K, V]. dn_last: [N, NH, K]. Gradients of the last state; None is zero.
        eps, chunk_size: as in the forward; the result does not depend on ``chunk_size``.
        sigmoid_gate: mLSTMsig instead of mLSTMexp.
        normalize: as in mLSTMsig; False ignores n_initial and dn_last.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.
    """
    tokens = (q, k, v, i, f)
    c, n, m = first_state(tokens, (c_initial, n_initial, m_initial), cu_seqlens, sigmoid_gate, normalize)
    dc = torch.zeros_like(c) if dc_last is None else dc_last
    dn = torch.zeros_like(n) if dn_last is None or not normalize else dn_last
    promoted = promote(*tokens, dh, c, n, m, dc, dn)
    parts = [
        _sequence_backward(own, state, eps, chunk_size, sigmoid_gate, normalize)
        for own, state in split_sequences(promoted[:6], promoted[6:], cu_seqlens)
    ]
    grads = _joined([part.grads for part in parts], 5)
    return MLSTMBackward(
        MLSTMGrads(*(g.to(x.dtype) for g, x in zip(grads, (*tokens, c, n), strict=True))),
        [chunk for part in parts for chunk in part.forward],
        [chunk for part in parts for chunk in part.backward],
        *_joined([(part.k_dk, part.dlog_f) for part in parts], 2),
    )


def _joined(parts: Sequence[Sequence[Tensor]], tokens: int) -> list[Tensor]:
    """The sequences' results as one: the first ``tokens`` of them per token, the others per sequence."""
    columns = zip(*parts, strict=True)
    return [torch.cat(column, dim=2 if place < tokens else 0) for place, column in enumerate(columns)]


def _sequence_backward(
    tokens: States, state: States, eps: float, size: int, sigmoid_gate: bool, normalize: bool
) -> MLSTMBackward:
    """:func:`mlstm_backward_terms` of one sequence of any length.

    Args:
        tokens: q, k, v, i, f, dh. state: c, n, m before the first token, dc, dn after the last. All in the
            compute dtype.
    """
    q, k, v, i, f, dh = tokens
    c, n, m, dc, dn = state
    # forward in time
    forward = list(
        scan_mlstm((q, k, v, i, f), (c, n, m), eps, size, sigmoid_gate=sigmoid_gate, normalize=normalize)
    )
    states = [(c, n), *((out.c, out.n) for out in forward)]  # before every chunk, and the last

    # backward in time
    backward: list[MLSTMChunkGrads] = []
    pieces = split_chunks((q, k, v, dh), size)
    for place, out in reversed(list(enumerate(forward))):
        (q_c, k_c, v_c, dh_c), (c_in, n_in) = pieces[place], states[place]
        back = mlstm_chunk_backward(out, q_c, k_c, v_c, c_in, n_in, dh_c, dc, dn)
        backward.insert(0, back)
        dc, dn = back.dc, back.dn

    # an empty piece in front: there may be no token
    rows = [(chunk.dq, chunk.dk, chunk.dv, chunk.dlog_f) for chunk in backward]
    rows.insert(0, (q[:, :, :0], k[:, :, :0], v[:, :, :0], f[:, :, :0]))
    dq, dk, dv, dlog_f = (torch.cat(column, dim=2) for column in zip(*rows, strict=True))
    k_dk = (k * dk).sum(-1)
    di = k_dk * torch.sigmoid(-i) if sigmoid_gate else k_dk
    df = dlog_f * torch.sigmoid(-f)
    return MLSTMBackward(MLSTMGrads(dq, dk, dv, di, df, dc, dn), forward, backward, k_dk, dlog_f)


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
    cu_seqlens: Tensor | None = None,
) -> MLSTMGrads:
    """Exact gradients of mLSTMexp by the explicit formulas; arguments as in :func:`mlstm_backward_terms`."""
    return mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, dh, dc_last, dn_last, eps, chunk_size,
        cu_seqlens=cu_seqlens,
    ).grads  # fmt: skip


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
    """Exact gradients of mLSTMsig by the explicit formulas; arguments as in :func:`mlstm_backward_terms`."""
    return mlstm_backward_terms(
        q, k, v, i, f, c_initial, n_initial, None, dh, dc_last, dn_last, eps, chunk_size,
        sigmoid_gate=True, normalize=normalize, cu_seqlens=cu_seqlens,
    ).grads  # fmt: skip
