"""mLSTM with sigmoid input gate (mLSTMsig): step, recurrent, parallel and chunkwise form.

Source: Beck et al., "Tiled Flash Linear Attention" (2025). One head, with s = K^-1/2::

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

from .common import full_precision, is_by_token, other_form, promote
from .mlstm_forward import mlstm_by_token, mlstm_forward_terms

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
        q, k, v, i, f, c, eps: as of :func:`~.mlstm.mlstm_step`.
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
        others and errors: as of :func:`~.mlstm.mlstm_recurrent`.

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
