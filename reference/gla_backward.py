"""Explicit backward of gated linear attention.

In a chunk with b = cumsum(g) per channel, S the state that enters it, dS the gradient of the one that leaves
it, s the scale, P_tj = s sum_c q_tc k_jc e^{b_tc - b_jc} for j <= t, and dP = tril(do V^T)::

    dq_t = s e^{b_t} (do_t S^T) + s sum_j dP_tj k_j e^{b_t - b_j}
    dk_j = e^{b_L - b_j} (v_j dS^T) + s sum_t dP_tj q_t e^{b_t - b_j}
    dv   = P^T do + (e^{b_L - b} k) dS
    dS  <- e^{b_L} dS + s (e^b q)^T do
    dg_t = sum_{u >= t} s e^{b_u} q_u (do_u S^T) + sum_{j < t <= u} s dP_uj q_u k_j e^{b_u - b_j}
           + sum_{j < t} e^{b_L - b_j} k_j (v_j dS^T) + e^{b_L} rowsum_V(S . dS)

per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, einsum

from .common import BackwardForm, States, full_precision, log_decay_gradient, segment_sum
from .gla import gla_chunk
from .linear import run_backward


class GLAGrads(NamedTuple):
    """Gradients of :func:`gla_recurrent`, each in the dtype and shape of its input.

    Attributes:
        dq, dk: [B, T, H, K]. dv: [B, T, H, V]. dg: [B, T, H, K] gradient of the log decay.
        dh0: [N, H, K, V] gradient of the initial state.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dh0: Tensor


@full_precision
def gla_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> GLAGrads:
    """Exact gradients by the explicit formulas, chunk by chunk.

    Args:
        do: [B, T, H, V] gradient of o. dht: [N, H, K, V] gradient of the last state; None is zero.
        others: as in :func:`gla_recurrent`; the result does not depend on ``chunk_size``. A chunk needs
            memory for B H K chunk_size^2 numbers.

    Raises:
        ValueError: ``cu_seqlens`` that does not fit.
    """
    form = BackwardForm(gla_chunk, _chunk_backward)
    found = run_backward(form, q, k, v, (g,), do, dht, scale, initial_state, cu_seqlens, chunk_size)
    return GLAGrads(*found)


def _chunk_backward(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, s: Tensor, ds: Tensor
) -> States:
    """dq, dk, dv, dg and the gradient of the state that enters, of one chunk with q scaled."""
    decay = torch.exp(segment_sum(rearrange(g, "b h l k -> b h k l")))  # [B, H, K, L, L]
    through = torch.exp(g.cumsum(-2))
    to_end = rearrange(decay[..., -1, :], "b h k l -> b h l k")
    products = einsum("bhtk,bhktj,bhjk->bhktj", q, decay, k)
    dscores = einsum("bhtv,bhjv->bhtj", do, v)
    of_reads = through * einsum("bhtv,bhkv->bhtk", do, s)
    of_writes = to_end * einsum("bhjv,bhkv->bhjk", v, ds)
    dq = of_reads + einsum("bhtj,bhktj,bhjk->bhtk", dscores, decay, k)
    dk = of_writes + einsum("bhtj,bhktj,bhtk->bhjk", dscores, decay, q)
    dv = products.sum(2).mT @ do + (to_end * k) @ ds
    end = through[..., -1, :, None]
    dg = log_decay_gradient(
        products * dscores[:, :, None],
        rearrange(q * of_reads, "b h l k -> b h k l"),
        rearrange(k * of_writes, "b h l k -> b h k l"),
        (end * s * ds).sum(-1),
    )
    return dq, dk, dv, dg.mT, end * ds + (through * q).mT @ do
