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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, einsum
from torch.nn.functional import softplus

from . import common
from .common import States, full_precision, other_form, promote
from .linear import chunk_decay, run_linear

_R = TypeVar("_R")


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
    chunk = common.recomputed(gated_delta_chunk) if g.dim() == q.dim() else gated_delta_chunk
    form = common.scan(gated_delta_step, chunk, chunk_size)
    return run_linear(form, q, k, v, (g, beta), scale, initial_state, output_final_state, cu_seqlens)


gated_delta_rule_recurrent = other_form(
    "recurrent",
    gated_delta_rule_chunkwise,
    """Gated delta rule token by token: the specification of the operator.

    Args:
        g: [B, T, HV] natural-log decay, or [B, T, HV, K] per channel. beta: [B, T, HV] writing strength.
        others, result and errors: as of :func:`simple_gla_recurrent`.
    """,
)
gated_delta_rule_parallel = other_form(
    "parallel",
    gated_delta_rule_chunkwise,
    """Gated delta rule as one [T, T] triangular solve plus the term of the initial state.

    Arguments, result and errors as in :func:`gated_delta_rule_recurrent`.
    """,
)


def _without_decay(gated: Callable[..., _R], doc: str) -> Callable[..., _R]:
    """A form of the delta rule from that of the gated one, whose arguments it has but for g."""

    def form(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *args: Any, **kwargs: Any) -> _R:
        return gated(q, k, v, torch.zeros_like(beta), beta, *args, **kwargs)

    return common.described(form, gated, ("gated_", ""), "g", doc)


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


# those of KDA have g [B, T, HV, K]
kda_recurrent, kda_chunkwise = gated_delta_rule_recurrent, gated_delta_rule_chunkwise
kda_parallel = gated_delta_rule_parallel


@full_precision
def kda_with_states(
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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """:func:`kda_chunkwise` with the state that enters every chunk.

    Returns:
        (o, last state or None, states [B, NT, HV, K, V] of at least fp32). NT counts the chunks of a
        sequence, or those of all packed sequences, one sequence after the other.
    """
    states: list[Tensor] = []

    def chunk(*tokens_and_state: Tensor) -> tuple[Tensor, States]:
        states.append(tokens_and_state[-1])
        return gated_delta_chunk(*tokens_and_state)

    form = partial(common.scan_chunks, chunk, chunk_size)
    o, last = run_linear(form, q, k, v, (g, beta), scale, initial_state, True, cu_seqlens)
    assert last is not None
    none = last.new_empty(v.shape[0], 0, *last.shape[1:])
    between = torch.stack(states, dim=1) if states else none
    return o, last if output_final_state else None, between


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
    decay, beta = chunk_decay(g, q), beta[..., None]
    # writes: (I + strict_tril(beta KK)) U = beta (V - e^b K S)
    overlap = (beta * decay.products(k, k)).tril(-1)
    unwritten = beta * (v - (decay.through * k) @ s)
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    u = torch.linalg.solve_triangular(identity + overlap, unwritten, upper=False, unitriangular=True)
    # reads
    o = decay.products(q, k) @ u + (decay.through * q) @ s
    return o, (decay.whole * s + (decay.to_end * k).mT @ u,)


# How the inputs of the delta rule are made from what a layer computes, and the gradients back to it.
#
#     q, k    x / sqrt(sum x^2 + 1e-6)                 over the head dim
#     beta    sigmoid(x), times 2 where negative eigenvalues of I - beta k k^T are allowed
#     g       -exp(A_log) softplus(x + dt_bias)        A_log per head of v, dt_bias too, in KDA per channel
#             lower_bound sigmoid(exp(A_log) (x + dt_bias))    instead, in KDA with a lower bound
#
# Everything is differentiable by autograd and computed in the inputs' dtype, at least fp32; the functions
# named ``*_backward`` are the same gradients explicitly.

L2_EPS = 1e-6  # under the root


@full_precision
def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in at least fp32."""
    (x,) = promote(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


@full_precision
def l2_norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x [..., D] from that of `l2_norm(x)`, in x's dtype."""
    wide, dy = promote(x, dy)
    rsqrt = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + L2_EPS)
    y = rsqrt * wide
    return (rsqrt * (dy - y * (y * dy).sum(-1, keepdim=True))).to(x.dtype)


@full_precision
def writing_strength(x: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """sigmoid(x), times 2 with ``allow_neg_eigval``, in at least fp32."""
    (x,) = promote(x)
    return torch.sigmoid(x) * (2.0 if allow_neg_eigval else 1.0)


@full_precision
def writing_strength_backward(x: Tensor, dbeta: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """The gradient of x from that of `writing_strength(x)`, in x's dtype."""
    wide, dbeta = promote(x, dbeta)
    slope = torch.sigmoid(wide) * torch.sigmoid(-wide) * (2.0 if allow_neg_eigval else 1.0)
    return (dbeta * slope).to(x.dtype)


@full_precision
def delta_log_decay(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias), in at least fp32; see also ``lower_bound``.

    Args:
        x: [B, T, HV], or [B, T, HV, K] of KDA.
        A_log: [HV]; None is 0. dt_bias: [HV], of KDA [HV K]; None is 0.
        lower_bound: take lower_bound sigmoid(exp(A_log) (x + dt_bias)) instead.
    """
    rate, biased = _rate_and_biased(x, A_log, dt_bias)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * biased)
    return -rate * softplus(biased)


class LogDecayGrads(NamedTuple):
    """Gradients of :func:`delta_log_decay`, each in the dtype and shape of its input, None where it is."""

    dx: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None


@full_precision
def delta_log_decay_backward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, lower_bound: float | None = None
) -> LogDecayGrads:
    """The gradients from that of the log decay, dg like x; those of parameters are sums over B and T."""
    rate, biased = _rate_and_biased(x, A_log, dt_bias)
    dg = dg.to(biased.dtype)
    # the rate times dg alone may overflow
    if lower_bound is None:
        dx, d_a = -dg * (rate * torch.sigmoid(biased)), -dg * (rate * softplus(biased))
    else:
        inner = rate * biased
        slope = lower_bound * torch.sigmoid(inner) * torch.sigmoid(-inner)
        dx, d_a = dg * (slope * rate), dg * (slope * inner)
    of_bias = None if dt_bias is None else dx.sum((0, 1)).view_as(dt_bias).to(dt_bias.dtype)
    of_a = None if A_log is None else d_a.sum((0, 1)).view(len(A_log), -1).sum(1).to(A_log.dtype)
    return LogDecayGrads(dx.to(x.dtype), of_a, of_bias)


def _rate_and_biased(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(A_log) and x + dt_bias, the former to be multiplied with the latter."""
    dtype = common.compute_dtype(x, A_log, dt_bias)
    biased = x.to(dtype) if dt_bias is None else x.to(dtype) + dt_bias.to(dtype).view(x.shape[2:])
    rate = x.new_ones(x.shape[2], dtype=dtype) if A_log is None else torch.exp(A_log.to(dtype))
    return rate.view(-1, *[1] * (x.dim() - 3)), biased
