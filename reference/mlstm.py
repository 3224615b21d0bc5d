"""mLSTM with exponential (mLSTMexp) and with sigmoid input gate (mLSTMsig): step, recurrent, parallel and
chunkwise form.

Source: Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024), and Beck et al., "Tiled Flash Linear
Attention" (2025). One head, with lf_t = logsigmoid(f_t) and s = K^-1/2::

    m_t = max(lf_t + m_{t-1}, i_t)
    C_t = e^{lf_t + m_{t-1} - m_t} C_{t-1} + e^{i_t - m_t} k_t v_t^T
    n_t = e^{lf_t + m_{t-1} - m_t} n_{t-1} + e^{i_t - m_t} k_t
    h_t = s q_t^T C_t / (max(|s q_t.n_t|, e^{-m_t}) + eps)

m is a stabiliser: differentiation takes it as a constant, which is exact for h and for whatever is computed
from e^m C and e^m n. The initial state is C = 0, n = 0, m = 0.

A gate of -inf is closed: f_t = -inf forgets the state, i_t = -inf adds nothing to it. A state to which
nothing has been added since it was forgotten is empty: e^m C = 0 and e^m n = 0. Its m is -inf, its C and n
are zeros, h is 0 there, and no gradient passes through it. A given state with m = -inf is empty too,
whatever numbers its C and n hold, so an empty last state serves as an initial state; the next token with a
finite i starts afresh. In the equations e^{-inf - m} is 0 for every m, -inf included, and e^{-m} is inf for
m = -inf.

With a sigmoid input gate (mLSTMsig), one head, with s = K^-1/2::

    C_t = sigmoid(f_t) C_{t-1} + sigmoid(i_t) k_t v_t^T
    n_t = sigmoid(f_t) n_{t-1} + sigmoid(i_t) k_t
    h_t = s q_t^T C_t / (max(|s q_t.n_t|, 1) + eps)        normalize=True
    h_t = s q_t^T C_t                                      normalize=False

Both gates are at most 1: no stabiliser. Without normalisation there is no n: an initial n is ignored and the
last n is zeros (mlstm_kernels 2.0.6 returns uninitialised memory there).
"""

from functools import partial

import torch
from torch import Tensor, einsum
from torch.nn.functional import logsigmoid

from .common import full_precision, is_by_token, other_form, promote
from .mlstm_forward import finite_stabiliser, mlstm_by_token, mlstm_forward_terms

MLSTMState = tuple[Tensor, Tensor, Tensor]


@full_precision
def mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float = 1e-6
) -> tuple[Tensor, MLSTMState]:
    """One token of the recurrence: the specification of the operator.

    Args:
        q, k: [B, NH, K]. v: [B, NH, V]. Any float dtype.
        i, f: [B, NH, 1] gate pre-activations.
        c: [B, NH, K, V]. n: [B, NH, K]. m: [B, NH, 1], -inf of an empty state.
        eps: added to the normaliser after the maximum.

    Returns:
        h [B, NH, V] in q's dtype and (c, n, m), at least fp32.
    """
    dtype = q.dtype
    q, k, v, i, f, c, n, m = promote(q, k, v, i, f, c, n, m)
    scale = q.shape[-1] ** -0.5
    log_f = logsigmoid(f)

    m_old, m = m.detach(), torch.maximum(log_f + m, i).detach()
    base = finite_stabiliser(m)
    forget = torch.exp(log_f + m_old - base)
    write = torch.exp(i - base)
    c = forget[..., None] * c + einsum("bhk,bhv->bhkv", write * k, v)
    n = forget * n + write * k

    d = scale * einsum("bhk,bhk->bh", q, n)[..., None]
    floor = torch.exp(-base)
    w = torch.where(d.abs() > floor, d.abs(), floor) + eps
    h = scale * einsum("bhk,bhkv->bhv", q, c) / w
    return h.to(dtype), (c, n, m)


@full_precision
def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int = 64,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, MLSTMState]:
    """mLSTM in chunks: parallel inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`mlstm_recurrent`; ``chunk_size`` is any positive number of
    tokens and the last chunk may be shorter.
    """
    if is_by_token(chunk_size):
        initial = c_initial, n_initial, m_initial
        h, state = mlstm_by_token(partial(mlstm_step, eps=eps), (q, k, v, i, f), initial, cu_seqlens)
        return (h, state) if return_last_states else h
    out = mlstm_forward_terms(
        q, k, v, i, f, c_initial, n_initial, m_initial, eps, chunk_size, cu_seqlens=cu_seqlens
    )
    return (out.h, (out.c, out.n, out.m)) if return_last_states else out.h


mlstm_recurrent = other_form(
    "recurrent",
    mlstm_chunkwise,
    """mLSTM token by token.

    Args:
        q, k: [B, NH, S, K]. v: [B, NH, S, V]. Any float dtype; computed in their common dtype, at least fp32.
        i, f: [B, NH, S] gate pre-activations; -inf closes a gate.
        c_initial: [N, NH, K, V]. n_initial: [N, NH, K]. m_initial: [N, NH, 1], -inf of an empty state. All
            three or none (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        return_last_states: also return the state after the last token; of an empty one m is -inf, c and n
            are zeros.
        eps: added to the normaliser after the maximum.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.

    Returns:
        h [B, NH, S, V] in q's dtype, or (h, (c, n, m)) with states of at least fp32.

    Raises:
        ValueError: only some initial states, or ``cu_seqlens`` that does not fit.
    """,
)
mlstm_parallel = other_form(
    "parallel",
    mlstm_chunkwise,
    """mLSTM as one masked [S, S] product plus the term of the initial state.

    Arguments, result and errors as in :func:`mlstm_recurrent`.
    """,
)


SigingState = tuple[Tensor, Tensor]


@full_precision
def mlstm_siging_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    eps: float = 1e-6,
    normalize: bool = True,
) -> tuple[Tensor, SigingState]:
    """One token of the recurrence: the specification of the operator.

    Args:
        q, k, v, i, f, c, eps: as of :func:`mlstm_step`.
        n: [B, NH, K], passed through if ``normalize`` is False.
        normalize: divide by the normaliser.

    Returns:
        h [B, NH, V] in q's dtype and (c, n), at least fp32.
    """
    dtype = q.dtype
    q, k, v, i, f, c, n = promote(q, k, v, i, f, c, n)
    scale = q.shape[-1] ** -0.5
    forget, write = torch.sigmoid(f), torch.sigmoid(i)

    c = forget[..., None] * c + einsum("bhk,bhv->bhkv", write * k, v)
    h = scale * einsum("bhk,bhkv->bhv", q, c)
    if normalize:
        n = forget * n + write * k
        d = scale * einsum("bhk,bhk->bh", q, n)[..., None]
        h = h / (torch.where(d.abs() > 1, d.abs(), 1.0) + eps)
    return h.to(dtype), (c, n)


@full_precision
def mlstm_siging_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    normalize: bool = True,
    chunk_size: int = 64,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, SigingState]:
    """mLSTMsig in chunks: parallel inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`mlstm_siging_recurrent`; ``chunk_size`` is any positive number
    of tokens and the last chunk may be shorter.
    """
    if is_by_token(chunk_size):
        step = partial(mlstm_siging_step, eps=eps, normalize=normalize)
        given, options = (c_initial, n_initial, None), {"sigmoid_gate": True, "normalize": normalize}
        h, state = mlstm_by_token(step, (q, k, v, i, f), given, cu_seqlens, **options)
        return (h, state) if return_last_states else h
    out = mlstm_forward_terms(
        q, k, v, i, f, c_initial, n_initial, None, eps, chunk_size,
        sigmoid_gate=True, normalize=normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return (out.h, (out.c, out.n)) if return_last_states else out.h


mlstm_siging_recurrent = other_form(
    "recurrent",
    mlstm_siging_chunkwise,
    """mLSTMsig token by token.

    Args:
        c_initial, n_initial: both or none (zeros); n_initial is ignored if ``normalize`` is False.
        normalize: divide by the normaliser.
        others and errors: as of :func:`mlstm_recurrent`.

    Returns:
        h [B, NH, S, V] in q's dtype, or (h, (c, n)) with states of at least fp32; n is zeros if ``normalize``
        is False.
    """,
)
mlstm_siging_parallel = other_form(
    "parallel",
    mlstm_siging_chunkwise,
    """mLSTMsig as one masked [S, S] product plus the term of the initial state.

    Arguments, result and errors as in :func:`mlstm_siging_recurrent`.
    """,
)
