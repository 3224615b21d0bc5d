"""One chunk of the mLSTM: what the chunkwise form, the parallel form and the backward formulas share."""

from typing import NamedTuple

import torch
from torch import Tensor, einsum

from .common import segment_sum


class MLSTMChunk(NamedTuple):
    """Every term of one chunk of L tokens; shapes without the leading [B, NH]."""

    h: Tensor  #: [L, V] output
    num: Tensor  #: [L, V] numerator s q_t^T C_t
    d: Tensor  #: [L] s q_t.n_t, or 0 without normalisation
    floor: Tensor  #: [L] lower bound of the normaliser: e^{-m_t}, inf for m_t = -inf; 1 with the sigmoid gate
    w: Tensor  #: [L] normaliser max(|d|, floor) + eps, or 1 without normalisation
    m_t: Tensor  #: [L] stabiliser of every token, -inf where the state is empty
    gates: Tensor  #: [L, L] W_tj = e^{b_t - b_j + i_j - m_t}, 0 for j > t; the last row is w^end
    inter: Tensor  #: [L] e^{b_t + m_in - m_t}, decay of the incoming state
    c: Tensor  #: [K, V] outgoing state
    n: Tensor  #: [K] outgoing normaliser state
    m: Tensor  #: [1] outgoing stabiliser


def finite_stabiliser(m: Tensor) -> Tensor:
    """m, or the smallest finite number for m = -inf: what log gates are taken relative to.

    A log gate of -inf minus the result is -inf, where -inf - m would be NaN. NaN stays NaN.
    """
    return m.clamp(min=torch.finfo(m.dtype).min)


def mlstm_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    *,
    stabilise: bool,
    normalize: bool,
    eps: float,
) -> MLSTMChunk:
    """mLSTM over one chunk with incoming state (c, n, m).

    The stabiliser is a constant of the differentiation: h does not depend on it. Log gates and m may be
    -inf; :mod:`.mlstm` says what that means.

    Args:
        q, k: [B, NH, L, K]. v: [B, NH, L, V]. All of one dtype, at least fp32; L >= 1.
        log_i, log_f: [B, NH, L] log gates: i and logsigmoid(f), or logsigmoid of both.
        c: [B, NH, K, V]. n: [B, NH, K]. m: [B, NH, 1].
        stabilise: True for the exponential input gate, False for the sigmoid input gate (m_t = 0).
        normalize: divide by the normaliser; False leaves n as it came.
        eps: added after the maximum.
    """
    scale = q.shape[-1] ** -0.5
    # gates
    b = log_f.cumsum(-1)
    log_intra = segment_sum(log_f) + log_i[..., None, :]
    log_inter = b + m.detach()
    m_t = torch.maximum(log_inter, log_intra.amax(-1)).detach() if stabilise else torch.zeros_like(b)
    base = finite_stabiliser(m_t)
    gates = torch.exp(log_intra - base[..., None])
    inter = torch.exp(log_inter - base)
    # numerator and normaliser
    scores = scale * einsum("bhtk,bhjk->bhtj", q, k) * gates
    q_inter = scale * inter[..., None] * q
    num = einsum("bhtj,bhjv->bhtv", scores, v) + einsum("bhtk,bhkv->bhtv", q_inter, c)
    floor = torch.exp(-base)
    if normalize:
        d = scores.sum(-1) + einsum("bhtk,bhk->bht", q_inter, n)
        w = torch.where(d.abs() > floor, d.abs(), floor) + eps
    else:
        d, w = torch.zeros_like(b), torch.ones_like(b)
    # outgoing state
    k_end = gates[..., -1, :, None] * k
    decay = inter[..., -1:]
    c_out = decay[..., None] * c + einsum("bhjk,bhjv->bhkv", k_end, v)
    n_out = decay * n + k_end.sum(-2) if normalize else n
    return MLSTMChunk(num / w[..., None], num, d, floor, w, m_t, gates, inter, c_out, n_out, m_t[..., -1:])
