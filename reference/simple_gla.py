"""Linear attention with one scalar decay per token and head: simple GLA, RetNet, Lightning, Mamba-2's SSD.

Source: Yang et al., "Gated Linear Attention" (2024); Sun et al., "Retentive Network" (2023); Qin et al.,
"Lightning Attention-2" (2024). One head, with log decay g_t and scale s::

    S_t = e^{g_t} S_{t-1} + k_t v_t^T
    o_t = s q_t^T S_t
"""

import torch
from torch import Tensor

from .common import BackwardForm, full_precision, other_form, recomputed, scan
from .linear import LinearGrads, linear_chunk, linear_chunk_backward, linear_step, run_backward, run_linear


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
    *,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Scalar-decay linear attention in chunks: parallel inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`simple_gla_recurrent`; ``chunk_size`` is any positive number of
    tokens and the last chunk may be shorter.
    """
    chunk = recomputed(linear_chunk) if g is not None and g.dim() == q.dim() else linear_chunk
    form = scan(linear_step, chunk, chunk_size)
    gates = (log_decay(v, g, g_gamma),)
    return run_linear(
        form, q, k, v, gates, scale, initial_state, output_final_state, cu_seqlens, state_v_first
    )


simple_gla_recurrent = other_form(
    "recurrent",
    simple_gla_chunkwise,
    """Scalar-decay linear attention token by token: the specification of the operator.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. Any float dtype; computed in the common dtype, at least fp32.
            HV is a multiple of H; head h of q and k serves heads h HV/H to (h + 1) HV/H - 1 of v.
        g: [B, T, HV] natural-log decay per token. g_gamma: [HV] natural-log decay per head. Both given: their
            sum; none: no decay.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, HV, K, V] or None (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the last state instead of None.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.
        state_v_first: states are [N, HV, V, K].

    Returns:
        (o [B, T, HV, V] in q's dtype, state [N, HV, K, V] of at least fp32 or None).

    Raises:
        ValueError: HV is no multiple of H, or ``cu_seqlens`` that does not fit.
    """,
)
simple_gla_parallel = other_form(
    "parallel",
    simple_gla_chunkwise,
    """Scalar-decay linear attention as one masked [T, T] product plus the term of the initial state.

    Arguments, result and errors as in :func:`simple_gla_recurrent`.
    """,
)


def log_decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """The log decay [B, T, HV] that g and g_gamma stand for."""
    decay = torch.zeros_like(v[..., 0]) if g is None else g
    return decay if g_gamma is None else decay + g_gamma


@full_precision
def simple_gla_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    state_v_first: bool = False,
) -> LinearGrads:
    """Exact gradients by the explicit formulas, chunk by chunk.

    In a chunk with b = cumsum(g), E_tj = e^{b_t - b_j} for j <= t and else 0, S the state that enters it, dS
    the gradient of the one that leaves it, and s the scale::

        dq = s (E . do v^T) k + s e^b (do S^T)
        dk = s (E . do v^T)^T q + e^{b_L - b} (v dS^T)
        dv = s (E . q k^T)^T do + e^{b_L - b} (k dS)
        dS <- e^{b_L} dS + s (e^b q)^T do
        dg_t = sum_{u >= t} s e^{b_u} q_u . (S do_u) + sum_{j < t <= u} s E_uj (do_u . v_j) (q_u . k_j)
               + sum_{j < t} e^{b_L - b_j} k_j . (dS v_j) + e^{b_L} <S, dS>

    Args:
        do: [B, T, HV, V] gradient of o. dht: gradient of the last state, shaped like it; None is zero.
        others and errors: as of :func:`simple_gla_recurrent`; the result does not depend on ``chunk_size``.
    """
    form = BackwardForm(linear_chunk, linear_chunk_backward)
    gates = (log_decay(v, g, g_gamma),)
    found = run_backward(
        form, q, k, v, gates, do, dht, scale, initial_state, cu_seqlens, chunk_size, state_v_first
    )
    return LinearGrads(*found)


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
    return (-8 / max(num_heads, 1) * (1 - layer_idx / num_layers) * heads).to(dtype)
