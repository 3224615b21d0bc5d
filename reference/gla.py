"""Gated linear attention: one decay per token, head and key channel.

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024). One head,
with log decay g_t in R^K and scale s::

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T
    o_t = s q_t^T S_t

Backward: in a chunk with b = cumsum(g) per channel, S the state that enters it, dS the gradient of the one
that leaves it, s the scale, P_tj = s sum_c q_tc k_jc e^{b_tc - b_jc} for j <= t, and dP = tril(do V^T)::

    dq_t = s e^{b_t} (do_t S^T) + s sum_j dP_tj k_j e^{b_t - b_j}
    dk_j = e^{b_L - b_j} (v_j dS^T) + s sum_t dP_tj q_t e^{b_t - b_j}
    dv   = P^T do + (e^{b_L - b} k) dS
    dS  <- e^{b_L} dS + s (e^b q)^T do
    dg_t = sum_{u >= t} s e^{b_u} q_u (do_u S^T) + sum_{j < t <= u} s dP_uj q_u k_j e^{b_u - b_j}
           + sum_{j < t} e^{b_L - b_j} k_j (v_j dS^T) + e^{b_L} rowsum_V(S . dS)

per channel.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from . import simple_gla
from .common import described

_R = TypeVar("_R")


def _of_channels(form: Callable[..., _R], doc: str, g_gamma: tuple[None, ...] = (None,)) -> Callable[..., _R]:
    """A form of GLA from that of simple GLA, which takes a decay per channel as g, too. g_gamma: what is in
    its place behind g."""

    def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> _R:
        return form(q, k, v, g, *g_gamma, *args, **kwargs)

    return described(gla, form, ("simple_", ""), "g_gamma", doc)


gla_recurrent = _of_channels(
    simple_gla.simple_gla_recurrent,
    """Gated linear attention token by token: the specification of the operator.

    Args:
        g: [B, T, H, K] natural-log decay per channel.
        others, result and errors: as of :func:`simple_gla_recurrent`, HV = H.
    """,
)
gla_chunkwise = _of_channels(
    simple_gla.simple_gla_chunkwise,
    """Gated linear attention in chunks: all pairs inside a chunk, recurrent from chunk to chunk.

    Arguments, result and errors as in :func:`gla_recurrent`; ``chunk_size`` is any positive number of tokens
    and the last chunk may be shorter. A chunk needs memory for B H K chunk_size^2 numbers; the backward pass
    recomputes chunk by chunk, so that it needs no more. Under torch.func it keeps them all.
    """,
)
gla_parallel = _of_channels(
    simple_gla.simple_gla_parallel,
    """Gated linear attention over all pairs of tokens, through a [B, H, K, T, T] tensor: short T only.

    Arguments, result and errors as in :func:`gla_recurrent`.
    """,
)
gla_backward = _of_channels(
    simple_gla.simple_gla_backward,
    """Exact gradients by the explicit formulas, chunk by chunk.

    Args:
        do: [B, T, H, V] gradient of o. dht: [N, H, K, V] gradient of the last state; None is zero.
        others: as in :func:`gla_recurrent`; the result does not depend on ``chunk_size``. A chunk needs
            memory for B H K chunk_size^2 numbers.
    """,
    g_gamma=(),
)
