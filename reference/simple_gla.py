"""Linear attention with one scalar decay per token and head: simple GLA, RetNet, Lightning, Mamba-2's SSD.

Source: Yang et al., "Gated Linear Attention" (2024); Sun et al., "Retentive Network" (2023); Qin et al.,
"Lightning Attention-2" (2024). One head, with log decay g_t and scale s::

    S_t = e^{g_t} S_{t-1} + k_t v_t^T
    o_t = s q_t^T S_t
"""

from __future__ import annotations

import torch
from torch import Tensor, einsum

from .common import States, full_precision, scan_chunks, scan_tokens, segment_sum
from .linear import run_linear


@full_precision
def simple_gla_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scalar-decay linear attention token by token: the specification of the operator.

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. Any float dtype; computed in the common dtype, at least fp32.
        g: [B, T, H] natural-log decay per token. g_gamma: [H] natural-log decay per head. Both given: their
            sum; none: no decay.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, H, K, V] or None (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the last state instead of None.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.

    Returns:
        (o [B, T, H, V] in q's dtype, state [N, H, K, V] of at least fp32 or None).

    Raises:
        ValueError: ``cu_seqlens`` that does not fit.
    """

    def form(*args: Tensor) -> tuple[Tensor, States]:
        return scan_tokens(simple_gla_step, args[:4], args[4:])

    gates = (log_decay(v, g, g_gamma),)
    return run_linear(form, q, k, v, gates, scale, initial_state, output_final_state, cu_seqlens)


@full_precision
def simple_gla_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scalar-decay linear attention as one masked [T, T] product plus the term of the initial state.

    Arguments, result and errors as in :func:`simple_gla_recurrent`.
    """

    def form(*args: Tensor) -> tuple[Tensor, States]:
        return scan_chunks(simple_gla_chunk, args[:4], args[4:], max(args[0].shape[2], 1))

    gates = (log_decay(v, g, g_gamma),)
    return run_linear(form, q, k, v, gates, scale, initial_state, output_final_state, cu_seqlens)


@full_precision
def simple_gla_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Scalar-decay linear attention in chunks: parallel inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`simple_gla_recurrent`; ``chunk_size`` is any positive number of
    tokens and the last chunk may be shorter.
    """

    def form(*args: Tensor) -> tuple[Tensor, States]:
        return scan_chunks(simple_gla_chunk, args[:4], args[4:], chunk_size)

    gates = (log_decay(v, g, g_gamma),)
    return run_linear(form, q, k, v, gates, scale, initial_state, output_final_state, cu_seqlens)


def simple_gla_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One token, q scaled: q, k [B, H, K], v [B, H, V], g [B, H], s [B, H, K, V]."""
    s = torch.exp(g)[..., None, None] * s + einsum("bhk,bhv->bhkv", k, v)
    return einsum("bhk,bhkv->bhv", q, s), (s,)


def simple_gla_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One chunk, q scaled: q, k [B, H, L, K], v [B, H, L, V], g [B, H, L], s [B, H, K, V]."""
    decay = torch.exp(segment_sum(g))
    through = torch.exp(g.cumsum(-1))
    scores = einsum("bhtk,bhjk->bhtj", q, k) * decay
    o = einsum("bhtj,bhjv->bhtv", scores, v) + through[..., None] * einsum("bhtk,bhkv->bhtv", q, s)
    k_end = decay[..., -1, :, None] * k
    return o, (through[..., -1, None, None] * s + einsum("bhjk,bhjv->bhkv", k_end, v),)


def log_decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """The log decay [B, T, H] that g and g_gamma stand for."""
    decay = torch.zeros_like(v[..., 0]) if g is None else g
    return decay if g_gamma is None else decay + g_gamma


def retention_log_decay(
    num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """RetNet's log decay per head, log(1 - 2^(-5-h)), as g_gamma [H]."""
    heads = torch.arange(num_heads, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5 - heads)).to(dtype)


def lightning_log_decay(
    num_heads: int,
    layer_idx: int,
    num_layers: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Lightning Attention's log decay per head, -(8/H) (1 - layer_idx / num_layers) h, as g_gamma [H]."""
    heads = torch.arange(num_heads, dtype=torch.float64, device=device)
    return (-8 / num_heads * (1 - layer_idx / num_layers) * heads).to(dtype)
