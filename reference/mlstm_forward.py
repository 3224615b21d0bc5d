"""Forward of mLSTMexp and mLSTMsig: one chunk, which all forms and the backward share, over chunks with the
terms per token that a backward needs, and token by token."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, einsum
from torch.nn.functional import logsigmoid

from . import common

Initial = tuple[Tensor | None, Tensor | None, Tensor | None]  # c, n, m


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
    log_intra = common.segment_sum(log_f) + log_i[..., None, :]
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


class MLSTMForward(NamedTuple):
    """Output, last state and terms per token; N is B, or the number of sequences with ``cu_seqlens``."""

    h: Tensor  #: [B, NH, S, V] in q's dtype
    c: Tensor  #: [N, NH, K, V]
    n: Tensor  #: [N, NH, K], zeros without normalisation
    m: Tensor  #: [N, NH, 1], zeros with the sigmoid gate
    d: Tensor  #: [B, NH, S] s q_t.n_t in units of e^{m_t}, or 0 without normalisation
    m_t: Tensor  #: [B, NH, S] stabiliser of every token, -inf of an empty state, 0 with the sigmoid gate


@common.full_precision
def mlstm_forward_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    eps: float = 1e-6,
    chunk_size: int = 64,
    *,
    sigmoid_gate: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> MLSTMForward:
    """Forward of mLSTM with its terms per token, in the inputs' common dtype, at least fp32.

    Arguments and errors as in :func:`~.mlstm.mlstm_chunkwise`.

    Args:
        m_initial: not used by the sigmoid gate.
        sigmoid_gate: mLSTMsig instead of mLSTMexp.
        normalize: as in mLSTMsig; False ignores n_initial.
    """
    tokens = (q, k, v, i, f)
    state = first_state(tokens, (c_initial, n_initial, m_initial), cu_seqlens, sigmoid_gate, normalize)
    promoted = common.promote(*tokens, *state)
    hs, ds, m_ts, lasts = [], [], [], []
    for own_tokens, own_state in common.split_sequences(promoted[:5], promoted[5:], cu_seqlens):
        for chunk in scan_mlstm(
            own_tokens, own_state, eps, chunk_size, sigmoid_gate=sigmoid_gate, normalize=normalize
        ):
            hs.append(chunk.h)
            ds.append(chunk.d)
            m_ts.append(chunk.m_t)
            own_state = chunk[-3:]
        lasts.append(own_state)
    # empty pieces in front: there may be no token
    h = torch.cat([promoted[2][:, :, :0], *hs], dim=2)
    d, m_t = (torch.cat([promoted[3][:, :, :0], *rows], dim=2) for rows in (ds, m_ts))
    c, n, m = (torch.cat(rows) for rows in zip(*lasts, strict=True))
    return MLSTMForward(h.to(q.dtype), c, n, m, d, m_t)


def mlstm_by_token(
    step: common.Step,
    tokens: common.States,
    initial: Initial,
    cu_seqlens: Tensor | None,
    *,
    sigmoid_gate: bool = False,
    normalize: bool = True,
) -> tuple[Tensor, Any]:
    """h in q's dtype and the last state, (c, n, m) or with the sigmoid gate (c, n). step: of one token.
    tokens: q, k, v, i, f. Others as of :func:`mlstm_forward_terms`."""
    state = first_state(tokens, initial, cu_seqlens, sigmoid_gate, normalize)
    *operands, i, f = tokens
    promoted = common.promote(*operands, i[..., None], f[..., None], *(state[:2] if sigmoid_gate else state))
    h, last = common.scan_sequences(partial(common.scan_tokens, step), promoted[:5], promoted[5:], cu_seqlens)
    return h.to(tokens[0].dtype), last


def first_state(
    tokens: common.States, initial: Initial, cu_seqlens: Tensor | None, sigmoid_gate: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(c, n, m) as given, or zeros; m is zeros with the sigmoid gate, n without normalisation. ValueError:
    some of those that count are given, and others are not."""
    q, _, v, *_ = tokens
    counting = (True, normalize, not sigmoid_gate)
    given = ["cnm"[place] for place in range(3) if counting[place] and initial[place] is not None]
    if 0 < len(given) < sum(counting):
        expected = "c and n" if sigmoid_gate else "c, n and m"
        raise ValueError(
            f"initial states: expected {expected} together or none of them, got only {', '.join(given)}"
        )
    count, heads, dim_qk = common.sequence_count(q.shape[0], cu_seqlens), q.shape[1], q.shape[-1]
    dtype = common.compute_dtype(*tokens)
    c, n, m = (
        x if x is not None and counts else q.new_zeros(count, heads, *dims, dtype=dtype)
        for x, counts, dims in zip(initial, counting, ((dim_qk, v.shape[-1]), (dim_qk,), (1,)), strict=True)
    )
    return c, n, m


def scan_mlstm(
    tokens: common.States, state: common.States, eps: float, size: int, *, sigmoid_gate: bool, normalize: bool
) -> Iterator[MLSTMChunk]:
    """The chunks of one sequence, first to last; none for a sequence without tokens. tokens: q, k, v, i,
    f. state: c, n, m before the first token. All of one dtype. size: tokens per chunk; the last chunk may
    be shorter."""
    *operands, i, f = tokens
    gates = (logsigmoid(i) if sigmoid_gate else i), logsigmoid(f)
    for piece in common.split_chunks((*operands, *gates), size):
        chunk = mlstm_chunk(*piece, *state, stabilise=not sigmoid_gate, normalize=normalize, eps=eps)
        yield chunk
        state = chunk[-3:]
