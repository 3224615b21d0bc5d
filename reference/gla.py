"""Gated linear attention: one decay per token, head and key channel.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024). One head,
with log decay g_t in R^K and scale s::

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
    o_t = s q_t^T S_t
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from torch import Tensor, einsum

from .common import (
    States,
    full_precision,
    in_one_chunk,
    recomputed,
    scan_chunks,
    scan_tokens,
    segment_sum,
)
from .linear import run_linear


@full_precision
def gla_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention token by token: the specification of the operator.

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. Any float dtype; computed in the common dtype, at least fp32.
        g: [B, T, H, K] natural-log decay per channel.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, H, K, V] or None (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the last state instead of None.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.

    Returns:
        (o [B, T, H, V] in q's dtype, state [N, H, K, V] of at least fp32 or None).

    Raises:
        ValueError: ``cu_seqlens`` that does not fit.
    """
    form = partial(scan_tokens, gla_step)
    return run_linear(form, q, k, v, (g,), scale, initial_state, output_final_state, cu_seqlens)


@full_precision
def gla_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention in chunks: all pairs inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`gla_recurrent`; ``chunk_size`` is any positive number of tokens
    and the last chunk may be shorter. A chunk needs memory for B H K chunk_size^2 numbers; the backward pass
    recomputes chunk by chunk, so that it needs no more. Under torch.func it keeps them all.
    """
    form = partial(scan_chunks, recomputed(gla_chunk), chunk_size)
    return run_linear(form, q, k, v, (g,), scale, initial_state, output_final_state, cu_seqlens)


gla_parallel = in_one_chunk(
    gla_chunkwise,
    """Gated linear attention over all pairs of tokens, through a [B, H, K, T, T] tensor: short T only.

    Arguments, result and errors as in :func:`gla_recurrent`.
    """,
)


def gla_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One token, q scaled: q, k, g [B, H, K], v [B, H, V], s [B, H, K, V]."""
    s = torch.exp(g)[..., None] * s + einsum("bhk,bhv->bhkv", k, v)
    return einsum("bhk,bhkv->bhv", q, s), (s,)


def gla_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One chunk, q scaled: q, k, g [B, H, L, K], v [B, H, L, V], s [B, H, K, V]."""
    decay = torch.exp(segment_sum(rearrange(g, "b h l k -> b h k l")))  # [B, H, K, L, L]
    through = torch.exp(g.cumsum(-2))
    scores = einsum("bhtk,bhktj,bhjk->bhtj", q, decay, k)
    o = einsum("bhtj,bhjv->bhtv", scores, v) + einsum("bhtk,bhkv->bhtv", q * through, s)
    k_end = rearrange(decay[..., -1, :], "b h k l -> b h l k") * k
    return o, (through[..., -1, :, None] * s + einsum("bhjk,bhjv->bhkv", k_end, v),)
