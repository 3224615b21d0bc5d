"""Forward of mLSTMexp and mLSTMsig: over chunks with the terms per token that a backward needs, and token by
token."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import common
from .mlstm_chunk import MLSTMChunk, mlstm_chunk

Initial = tuple[Tensor | None, Tensor | None, Tensor | None]  # c, n, m


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
