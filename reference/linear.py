"""The frame around the operators in [B, T, H, D]: scale, default state, packed sequences, layout."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, einsum

from . import common


def run_linear(
    form: common.Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply ``form`` over (scale * q, k, v, *gates) and a state, head-first and promoted, to every sequence.

    Args:
        form: maps tokens [N, HV, T, ...] and a state [N, HV, K, V] to (o [N, HV, T, V], (state,)).
        gates: [B, T, HV, ...]. state_v_first: initial_state and the last state are [N, HV, V, K].
        others and errors: as of :func:`~.simple_gla.simple_gla_recurrent`.

    Returns:
        (o [B, T, HV, V] in q's dtype, state [N, HV, K, V] of at least fp32 or None), contiguous.
    """
    q, k = repeat_heads(q, k, v)
    batch, _, heads, dim_v = v.shape
    dim_qk = q.shape[-1]
    if initial_state is None:
        count = common.sequence_count(batch, cu_seqlens)
        initial_state = q.new_zeros(count, heads, dim_qk, dim_v, dtype=common.compute_dtype(q, k, v, *gates))
    elif state_v_first:
        initial_state = initial_state.mT
    *tokens, state = common.promote(q, k, v, *gates, initial_state)
    tokens = [rearrange(x, "b t h ... -> b h t ...") for x in tokens]
    tokens[0] = tokens[0] * (dim_qk**-0.5 if scale is None else scale)
    o, (last,) = common.scan_sequences(form, tuple(tokens), (state,), cu_seqlens)
    o = rearrange(o, "b h t v -> b t h v").to(q.dtype).contiguous()
    if not output_final_state:
        return o, None
    return o, (last.mT if state_v_first else last).contiguous()


def head_groups(q: Tensor, v: Tensor) -> int:
    """How many heads of v [B, T, HV, V] every head of q [B, T, H, K] serves; ValueError for a fraction."""
    heads, value_heads = q.shape[2], v.shape[2]
    if heads == value_heads:
        return 1
    # torch.compile, which may have the sizes as symbols, does not know divmod
    if heads == 0 or value_heads == 0 or value_heads % heads != 0:
        raise ValueError(f"v: expected a multiple of q's {heads} heads, got {value_heads}")
    return value_heads // heads


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with the heads of v: head h of q and k serves heads h n to (h + 1) n - 1 of v, n = HV / H."""
    groups = head_groups(q, v)
    if groups == 1:
        return q, k
    return repeat(q, "b t h k -> b t (h n) k", n=groups), repeat(k, "b t h k -> b t (h n) k", n=groups)


class LinearGrads(NamedTuple):
    """Gradients of linear attention, each in the dtype and shape of its input."""

    dq: Tensor  #: [B, T, H, K], as dk summed over the heads of v that a head of q and k serves
    dk: Tensor  #: [B, T, H, K]
    dv: Tensor  #: [B, T, HV, V]
    #: that of the log decay, [B, T, HV], or [B, T, HV, K] per channel; its sum over B and T is that of a
    #: decay per head
    dg: Tensor
    dh0: Tensor  #: that of the initial state


def run_backward(
    form: common.BackwardForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    do: Tensor,
    dht: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    state_v_first: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients by explicit formulas, chunk by chunk, of tokens (scale * q, k, v, *gates) and one state.

    Args:
        others: as in :func:`run_linear`; HV is a multiple of H. do: [B, T, HV, V] gradient of o. dht: that of
            the last state, shaped like it; None is zero.

    Returns:
        (dq, dk, dv, *dgates, dh0), each in the dtype and shape of its input; dh0 without an initial state in
        the compute dtype.
    """
    groups = head_groups(q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = (*repeat_heads(q, k, v), v, *gates, do)
    shape = (common.sequence_count(v.shape[0], cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1])
    zero = q.new_zeros(shape, dtype=common.compute_dtype(*tokens))
    states = (zero if x is None else x.mT if state_v_first else x for x in (initial_state, dht))
    *promoted, h0, ds = common.promote(*tokens, *states)
    promoted = [rearrange(x, "b t h ... -> b h t ...") for x in promoted]
    promoted[0] = promoted[0] * scale
    sequences = common.split_sequences(promoted, (h0, ds), cu_seqlens)
    parts = [common.sequence_backward(form, chunk_size, own, (s,), (ds,)) for own, (s, ds) in sequences]
    *columns, dh0 = common.join_sequences(parts, len(tokens) - 1)
    found = [rearrange(x, "b h t ... -> b t h ...") for x in columns]
    found[0] = scale * found[0]
    found[:2] = [rearrange(x, "b t (h n) k -> b t h n k", n=groups).sum(3) for x in found[:2]]
    dh0 = dh0.mT if state_v_first else dh0
    like = (q, k, v, *gates, dh0 if initial_state is None else initial_state)
    return tuple(x.to(y.dtype) for x, y in zip((*found, dh0), like, strict=True))


# A decay within a chunk, and linear attention with one: what GLA, simple GLA and the delta rule share.
# Functions of tokens take q scaled, and log decays g [B, H, L], or [B, H, L, K] of every channel of k


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
            return common.log_decay_gradient(pairs, received.mT, sent.mT, passed.sum(-1)).mT
        pairs = self.pairs * sum(weights * (x @ k.mT) for weights, x in flows)
        return common.log_decay_gradient(pairs, received.sum(-1), sent.sum(-1), passed.sum((-1, -2)))


def chunk_decay(g: Tensor, q: Tensor) -> ChunkDecay:
    """Of log decays [B, H, L], or with as many dimensions as q [B, H, L, K] per channel."""
    through = torch.exp(g.cumsum(2))
    if g.dim() == q.dim():
        return ChunkDecay(torch.exp(common.segment_sum(g.mT)), through)
    return ChunkDecay(torch.exp(common.segment_sum(g)), through[..., None])


def linear_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, common.States]:
    """One token: q, k [B, H, K], v [B, H, V], g [B, H] or [B, H, K], s [B, H, K, V]."""
    rows = g if g.dim() == q.dim() else g[..., None]
    s = torch.exp(rows)[..., None] * s + einsum("bhk,bhv->bhkv", k, v)
    return einsum("bhk,bhkv->bhv", q, s), (s,)


def linear_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, common.States]:
    """One chunk: q, k [B, H, L, K], v [B, H, L, V], s [B, H, K, V]."""
    decay = chunk_decay(g, q)
    o = decay.products(q, k) @ v + (decay.through * q) @ s
    return o, (decay.whole * s + (decay.to_end * k).mT @ v,)


def linear_chunk_backward(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor, s: Tensor, ds: Tensor
) -> common.States:
    """dq, dk, dv, dg and the gradient of the state that enters, of one chunk (`BackwardForm`)."""
    decay = chunk_decay(g, q)
    dscores = do @ v.mT
    of_reads, of_writes = decay.through * (do @ s.mT), decay.to_end * (v @ ds.mT)
    dq = of_reads + decay.from_left(dscores, k)
    dk = of_writes + decay.from_right(dscores, q)
    dv = decay.products(q, k).mT @ do + (decay.to_end * k) @ ds
    dg = decay.gradient([(dscores, q)], k, q * of_reads, k * of_writes, decay.whole * s * ds)
    return dq, dk, dv, dg, decay.whole * ds + (decay.through * q).mT @ do
