"""A decay within a chunk, and linear attention with one: what GLA, simple GLA and the delta rule share.

Functions of tokens take q scaled, and log decays g [B, H, L], or [B, H, L, K] of every channel of k.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from .common import States, log_decay_gradient, segment_sum


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

    def gradient(self, flows: Sequence[tuple[Tensor, Tensor]], k: Tensor, *others: Tensor) -> Tensor:
        """That of g, from flows of gradient (`log_decay_gradient`). flows: weights [L, L] and x [L, K]:
        from token j to t flows e^{b_t - b_j} weights_tj x_t k_j. others: [L, K] to every token from the
        state that enters, [L, K] from it to the one that leaves, [K, V] from state to state."""
        received, sent, passed = others
        if self.per_channel:
            by_channel = sum(weights[:, :, None] * x.mT[..., None] for weights, x in flows)
            pairs = self.pairs * k.mT[..., None, :] * by_channel
            return log_decay_gradient(pairs, received.mT, sent.mT, passed.sum(-1)).mT
        pairs = self.pairs * sum(weights * (x @ k.mT) for weights, x in flows)
        return log_decay_gradient(pairs, received.sum(-1), sent.sum(-1), passed.sum((-1, -2)))


def chunk_decay(g: Tensor, q: Tensor) -> ChunkDecay:
    """Of log decays [B, H, L], or with as many dimensions as q [B, H, L, K] per channel."""
    through = torch.exp(g.cumsum(2))
    if g.dim() == q.dim():
        return ChunkDecay(torch.exp(segment_sum(g.mT)), through)
    return ChunkDecay(torch.exp(segment_sum(g)), through[..., None])


def linear_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One token: q, k [B, H, K], v [B, H, V], g [B, H] or [B, H, K], s [B, H, K, V]."""
    rows = g if g.dim() == q.dim() else g[..., None]
    s = torch.exp(rows)[..., None] * s + einsum("bhk,bhv->bhkv", k, v)
    return einsum("bhk,bhkv->bhv", q, s), (s,)


def linear_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, States]:
    """One chunk: q, k [B, H, L, K], v [B, H, L, V], s [B, H, K, V]."""
    decay = chunk_decay(g, q)
    o = decay.products(q, k) @ v + (decay.through * q) @ s
    return o, (decay.whole * s + (decay.to_end * k).mT @ v,)


def linear_chunk_backward(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, s: Tensor, ds: Tensor
) -> States:
    """dq, dk, dv, dg and the gradient of the state that enters, of one chunk (`BackwardForm`)."""
    decay = chunk_decay(g, q)
    dscores = do @ v.mT
    of_reads, of_writes = decay.through * (do @ s.mT), decay.to_end * (v @ ds.mT)
    dq = of_reads + decay.from_left(dscores, k)
    dk = of_writes + decay.from_right(dscores, q)
    dv = decay.products(q, k).mT @ do + (decay.to_end * k) @ ds
    dg = decay.gradient([(dscores, q)], k, q * of_reads, k * of_writes, decay.whole * s * ds)
    return dq, dk, dv, dg, decay.whole * ds + (decay.through * q).mT @ do
