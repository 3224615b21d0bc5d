"""DeltaNet, gated DeltaNet and Kimi Delta Attention (KDA).

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024) and
"Gated Delta Networks" (2025); Kimi Team, "Kimi Linear" (2025). One head, with decay D_t, writing strength
beta_t and scale s::

    S_t = D_t S_{t-1} + beta_t k_t (v_t - (D_t S_{t-1})^T k_t)^T
    o_t = s q_t^T S_t

D_t is 1 (DeltaNet), e^{g_t} (gated DeltaNet) or diag(e^{g_t}) with g_t in R^K (KDA). The functions of the
gated rule take g of either kind.

The chunkwise form solves for the writes U of a whole chunk (UT transform); it is well conditioned
for keys of norm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, einsum

from .common import (
    States,
    described,
    full_precision,
    in_one_chunk,
    recomputed,
    scan_chunks,
    scan_tokens,
    segment_sum,
)
from .linear import run_linear

R = TypeVar("R")


@full_precision
def gated_delta_rule_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule token by token: the specification of the operator.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. Any float dtype; computed in the common dtype, at least fp32.
            HV is a multiple of H; head h of q and k serves heads h HV/H to (h + 1) HV/H - 1 of v.
        g: [B, T, HV] natural-log decay, or [B, T, HV, K] per channel. beta: [B, T, HV] writing strength.
        scale: factor on q; None is K^-1/2.
        initial_state: [N, HV, K, V] or None (zeros); N is B, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the last state instead of None.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in a batch of one.

    Returns:
        (o [B, T, HV, V] in q's dtype, state [N, HV, K, V] of at least fp32 or None).

    Raises:
        ValueError: HV is no multiple of H, or ``cu_seqlens`` that does not fit.
    """
    form = partial(scan_tokens, gated_delta_step)
    return run_linear(form, q, k, v, (g, beta), scale, initial_state, output_final_state, cu_seqlens)


@full_precision
def gated_delta_rule_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule in chunks: a triangular solve inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`gated_delta_rule_recurrent`; ``chunk_size`` is any positive
    number of tokens and the last chunk may be shorter. With a decay per channel a chunk needs memory for
    B HV K chunk_size^2 numbers; the backward pass recomputes chunk by chunk, so that it needs no more. Under
    torch.func it keeps them all.
    """
    chunk = recomputed(gated_delta_chunk) if g.dim() == q.dim() else gated_delta_chunk
    form = partial(scan_chunks, chunk, chunk_size)
    return run_linear(form, q, k, v, (g, beta), scale, initial_state, output_final_state, cu_seqlens)


gated_delta_rule_parallel = in_one_chunk(
    gated_delta_rule_chunkwise,
    """Gated delta rule as one [T, T] triangular solve plus the term of the initial state.

    Arguments, result and errors as in :func:`gated_delta_rule_recurrent`.
    """,
)


def _without_decay(gated: Callable[..., R], doc: str) -> Callable[..., R]:
    """A form of the delta rule from that of the gated one, whose arguments it has but for g."""

    def form(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> R:
        return gated(q, k, v, torch.zeros_like(beta), beta, *args, **kwargs)

    return described(form, gated, ("gated_", ""), "g", doc)


delta_rule_recurrent = _without_decay(
    gated_delta_rule_recurrent,
    "Delta rule token by token; arguments as in :func:`gated_delta_rule_recurrent`, without decay.",
)
delta_rule_parallel = _without_decay(
    gated_delta_rule_parallel,
    "Delta rule as one [T, T] triangular solve; arguments as in :func:`gated_delta_rule_recurrent`.",
)
delta_rule_chunkwise = _without_decay(
    gated_delta_rule_chunkwise,
    "Delta rule in chunks; arguments as in :func:`gated_delta_rule_chunkwise`, without decay.",
)


class ChunkDecay(NamedTuple):
    """The decay in a chunk of L tokens, with b = cumsum(g); shapes without the leading [B, H].

    Attributes:
        pairs: [L, L] e^{b_t - b_j} for j <= t and else 0, or [K, L, L] per channel.
        through: [L, 1] e^b, or [L, K].
    """

    pairs: Tensor
    through: Tensor

    @property
    def per_channel(self) -> bool:
        """Every channel has a decay of its own."""
        return self.pairs.dim() > self.through.dim()

    @property
    def to_end(self) -> Tensor:
        """[L, 1] e^{b_L - b}, or [L, K]."""
        last = self.pairs[..., -1, :]
        return last.mT if self.per_channel else last[..., None]

    @property
    def whole(self) -> Tensor:
        """[1, 1] e^{b_L}, or [K, 1]."""
        return self.through[..., -1:, :].mT

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """[L, L] sum_c e^{b_tc - b_jc} x_tc y_jc of x, y [L, K]."""
        if self.per_channel:
            return einsum("bhtk,bhktj,bhjk->bhtj", x, self.pairs, y)
        return self.pairs * (x @ y.mT)

    def from_left(self, weights: Tensor, y: Tensor) -> Tensor:
        """[L, K] sum_j e^{b_t - b_j} weights_tj y_j."""
        if self.per_channel:
            return einsum("bhtj,bhktj,bhjk->bhtk", weights, self.pairs, y)
        return (self.pairs * weights) @ y

    def from_right(self, weights: Tensor, x: Tensor) -> Tensor:
        """[L, K] sum_t e^{b_t - b_j} weights_tj x_t."""
        if self.per_channel:
            return einsum("bhtj,bhktj,bhtk->bhjk", weights, self.pairs, x)
        return (self.pairs * weights).mT @ x


def chunk_decay(g: Tensor, *, per_channel: bool) -> ChunkDecay:
    """Of log decays [B, H, L], or [B, H, L, K] per channel."""
    through = torch.exp(g.cumsum(2))
    if per_channel:
        return ChunkDecay(torch.exp(segment_sum(g.mT)), through)
    return ChunkDecay(torch.exp(segment_sum(g)), through[..., None])


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, States]:
    """One token, q scaled: q, k [B, H, K], v [B, H, V], g [B, H] or [B, H, K], beta [B, H],
    s [B, H, K, V]."""
    rows = g if g.dim() == q.dim() else g[..., None]
    s = torch.exp(rows)[..., None] * s
    u = beta[..., None] * (v - einsum("bhk,bhkv->bhv", k, s))
    s = s + einsum("bhk,bhv->bhkv", k, u)
    return einsum("bhk,bhkv->bhv", q, s), (s,)


def gated_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, States]:
    """One chunk, q scaled: q, k [B, H, L, K], v [B, H, L, V], g [B, H, L] or [B, H, L, K], beta [B, H, L],
    s [B, H, K, V]."""
    decay = chunk_decay(g, per_channel=g.dim() == q.dim())
    through = decay.through
    beta = beta[..., None]
    # writes: (I + strict_tril(beta KK)) U = beta (V - e^b K S)
    overlap = (beta * decay.products(k, k)).tril(-1)
    unwritten = beta * (v - (through * k) @ s)
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    u = torch.linalg.solve_triangular(identity + overlap, unwritten, upper=False, unitriangular=True)
    # reads
    o = decay.products(q, k) @ u + (through * q) @ s
    return o, (decay.whole * s + (decay.to_end * k).mT @ u,)
