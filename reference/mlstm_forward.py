"""Chunkwise forward of mLSTMexp and mLSTMsig with the terms per token that a backward needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .common import States, full_precision, promote, sequence_count, split_sequences
from .mlstm import initial_state
from .mlstm_chunk import MLSTMChunk, mlstm_chunk
from .mlstm_siging import siging_initial_state


class MLSTMForward(NamedTuple):
    """Output, last state and terms per token; N is B, or the number of sequences with ``cu_seqlens``."""

    h: Tensor  #: [B, NH, S, V] in q's dtype
    c: Tensor  #: [N, NH, K, V]
    n: Tensor  #: [N, NH, K], zeros without normalisation
    m: Tensor  #: [N, NH, 1], zeros with the sigmoid gate
    d: Tensor  #: [B, NH, S] s q_t.n_t in units of e^{m_t}, or 0 without normalisation
    m_t: Tensor  #: [B, NH, S] stabiliser of every token, -inf of an empty state, 0 with the sigmoid gate


@full_precision
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
    promoted = promote(*tokens, *state)
    hs, ds, m_ts, lasts = [], [], [], []
    for own_tokens, own_state in split_sequences(promoted[:5], promoted[5:], cu_seqlens):
        chunks = scan_mlstm(
            own_tokens, own_state, eps, chunk_size, sigmoid_gate=sigmoid_gate, normalize=normalize
        )
        hs += [chunk.h for chunk in chunks]
        ds += [chunk.d for chunk in chunks]
        m_ts += [chunk.m_t for chunk in chunks]
        lasts.append(chunks[-1][-3:] if chunks else own_state)
    # empty pieces in front: there may be no token
    h = torch.cat([promoted[2][:, :, :0], *hs], dim=2)
    d, m_t = (torch.cat([promoted[3][:, :, :0], *rows], dim=2) for rows in (ds, m_ts))
    c, n, m = (torch.cat(rows) for rows in zip(*lasts, strict=True))
    return MLSTMForward(h.to(q.dtype), c, n, m, d, m_t)


def first_state(
    tokens: tuple[Tensor, ...],
    initial: tuple[Tensor | None, Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    sigmoid_gate: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(c, n, m) as given, or zeros; m is zeros with the sigmoid gate, n without normalisation."""
    count = sequence_count(tokens[0].shape[0], cu_seqlens)
    if not sigmoid_gate:
        return initial_state(tokens, initial, count)
    c, n = siging_initial_state(tokens, *initial[:2], count, normalize)
    return c, n, torch.zeros_like(n[..., :1])


def scan_mlstm(
    tokens: States, state: States, eps: float, size: int, *, sigmoid_gate: bool, normalize: bool
) -> list[MLSTMChunk]:
    """The chunks of one sequence, first to last; none for a sequence without tokens.

    Args:
        tokens: q, k, v, i, f. state: c, n, m before the first token. All of one dtype.
        size: tokens per chunk; the last chunk may be shorter.
    """
    q, k, v, i, f = tokens
    if q.shape[2] == 0:
        return []
    gates = (logsigmoid(i) if sigmoid_gate else i), logsigmoid(f)
    chunks: list[MLSTMChunk] = []
    for pieces in zip(*(x.split(int(size), dim=2) for x in (q, k, v, *gates)), strict=True):
        chunks.append(mlstm_chunk(*pieces, *state, stabilise=not sigmoid_gate, normalize=normalize, eps=eps))
        state = chunks[-1][-3:]
    return chunks
