"""Explicit backward of DeltaNet, gated DeltaNet and KDA, chunk by chunk, with every term in the open.

In a chunk with b = cumsum(g), E_tj = e^{b_t - b_j} for j <= t and else 0, S the state that enters it, dS the
gradient of the one that leaves it, and s the scale; stril is the part below the diagonal::

    forward     KK = stril(E . K K^T)       QK = s E . Q K^T        A = (I + diag(beta) KK)^{-1}
                X = e^b K S                 Y = beta (V - X)        U = A Y
                o = s e^b Q S + QK U        S <- e^{b_L} S + K_h^T U          K_h = e^{b_L - b} K

    R, backward in time
                dU = QK^T do + K_h dS       dY = A^T dU
                dS <- e^{b_L} dS + s (e^b Q)^T do - (e^b K)^T (beta dY)

    D1, forward in time: a linear attention over the states S, with two sets of queries, do and -beta dY
                dq       = s e^b (do S^T) + s (E . do U^T) K
                dk_left  = e^b (-beta dY S^T) + beta (E . M) K                M = -stril(dY U^T)
    D2, backward in time: one over the states dS, with two sets of keys
                dk_right = e^{b_L - b} (U dS^T) + s (E . do U^T)^T Q + (beta E . M)^T K

    dk = dk_left + dk_right         dv = beta dY         dbeta = rowsum(dY . (V - X)) + rowsum(M . KK)

    dg_t is the flow of gradient over the boundary before token t: from S to tokens u >= t, from tokens j < t
    to tokens u >= t, from tokens j < t to dS, and from S to dS
                dg_t = sum_{u >= t} from_S_u + sum_{j < t <= u} F_uj + sum_{j < t} to_dS_j + e^{b_L} <S, dS>
                from_S_u = e^{b_u} (s q_u . (S do_u) - k_u . (S beta dY_u))
                F_uj     = s (E . do U^T)_uj q_u . k_j + (beta E . M)_uj k_u . k_j
                to_dS_j  = e^{b_L - b_j} k_j . (dS U_j)

With a decay per channel every channel has its own E and b: a product with E K^T or E K sums over channels
with the E of each, and dg_t is that flow per channel, <S, dS> a sum over V alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import BackwardForm, States, full_precision
from .linear import chunk_decay, run_backward


class DeltaRuleGrads(NamedTuple):
    """Gradients of :func:`gated_delta_rule_recurrent`, each in the dtype and shape of its input."""

    dq: Tensor  #: [B, T, H, K], as dk summed over the heads of v that a head of q and k serves
    dk: Tensor  #: [B, T, H, K]
    dv: Tensor  #: [B, T, HV, V]
    dg: Tensor  #: of the log decay, [B, T, HV] or [B, T, HV, K]
    dbeta: Tensor  #: [B, T, HV] that of the writing strength
    dh0: Tensor  #: [N, HV, K, V] that of the initial state


@full_precision
def gated_delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> DeltaRuleGrads:
    """Exact gradients by the explicit formulas, chunk by chunk; the delta rule without gate has g = 0.

    Args:
        do: [B, T, HV, V] gradient of o. dht: [N, HV, K, V] gradient of the last state; None is zero.
        others: as in :func:`gated_delta_rule_recurrent`; the result does not depend on ``chunk_size``.
    """
    form = BackwardForm(_chunk_forward, _chunk_backward)
    found = run_backward(form, q, k, v, (g, beta), do, dht, scale, initial_state, cu_seqlens, chunk_size)
    return DeltaRuleGrads(*found)


kda_backward = gated_delta_rule_backward


def _chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[tuple[Any, ...], States]:
    """The decay (`ChunkDecay`), KK, QK, A, V - X and U of a chunk with q scaled, and the state behind it."""
    decay = chunk_decay(g, q)
    overlap = decay.products(k, k).tril(-1)
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device).expand_as(overlap)
    system = identity + beta[..., None] * overlap
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    unwritten = v - (decay.through * k) @ s
    writes = inverse @ (beta[..., None] * unwritten)
    leaving = decay.whole * s + (decay.to_end * k).mT @ writes
    return (decay, overlap, decay.products(q, k), inverse, unwritten, writes), (leaving,)


def _chunk_backward(forward: tuple[Any, ...], *given: Tensor) -> States:
    """dq, dk, dv, dg, dbeta and the gradient of the state that enters, of one chunk: R, then D1 and D2."""
    q, k, _, _, beta, do, s, ds = given
    decay, overlap, scores, inverse, unwritten, writes = forward
    through, to_end, whole = decay.through, decay.to_end, decay.whole
    beta = beta[..., None]
    # R
    dwrites = scores.mT @ do + (to_end * k) @ ds
    dy = inverse.mT @ dwrites
    dv = beta * dy
    ds_in = whole * ds + (through * q).mT @ do - (through * k).mT @ dv
    # D1 and D2
    dscores = do @ writes.mT
    m = -(dy @ writes.mT).tril(-1)
    dpairs = beta * m
    of_reads, of_erasures = through * (do @ s.mT), -through * (dv @ s.mT)
    of_writes = to_end * (writes @ ds.mT)
    dq = of_reads + decay.from_left(dscores, k)
    dk_left = of_erasures + decay.from_left(dpairs, k)
    dk_right = of_writes + decay.from_right(dscores, q) + decay.from_right(dpairs, k)
    received, sent, passed = q * of_reads + k * of_erasures, k * of_writes, whole * s * ds
    dg = decay.gradient([(dscores, q), (dpairs, k)], k, received, sent, passed)
    dbeta = (dy * unwritten).sum(-1) + (m * overlap).sum(-1)
    return dq, dk_left + dk_right, dv, dg, dbeta, ds_in
