"""How the inputs of the delta rule are made from what a layer computes, and the gradients back to it.

    q, k    x / sqrt(sum x^2 + 1e-6)                 over the head dim
    beta    sigmoid(x), times 2 where negative eigenvalues of I - beta k k^T are allowed
    g       -exp(A_log) softplus(x + dt_bias)        A_log per head of v, dt_bias too, in KDA per channel
            lower_bound sigmoid(exp(A_log) (x + dt_bias))    instead, in KDA with a lower bound

Everything is differentiable by autograd and computed in the inputs' dtype, at least fp32; the functions named
``*_backward`` are the same gradients explicitly.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .common import compute_dtype, full_precision, promote

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
    dtype = compute_dtype(x, A_log, dt_bias)
    biased = x.to(dtype) if dt_bias is None else x.to(dtype) + dt_bias.to(dtype).view(x.shape[2:])
    rate = x.new_ones(x.shape[2], dtype=dtype) if A_log is None else torch.exp(A_log.to(dtype))
    return rate.view(-1, *[1] * (x.dim() - 3)), biased
