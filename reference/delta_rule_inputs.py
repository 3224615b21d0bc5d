"""How the inputs of the delta rule are made from what a layer computes, and the gradients back to it.

    q, k    x / sqrt(sum x^2 + 1e-6)                 over the head dim
    beta    sigmoid(x), times 2 where negative eigenvalues of I - beta k k^T are allowed
    g       -exp(A_log) softplus(x + dt_bias)        A_log and dt_bias per head of v

Everything is differentiable by autograd and computed in the inputs' dtype, at least fp32; the functions named
``*_backward`` are the same gradients explicitly.
"""

from __future__ import annotations

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
def delta_log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """-exp(A_log) softplus(x + dt_bias), in at least fp32.

    Args:
        x: [B, T, HV]. A_log, dt_bias: [HV].
    """
    dtype = compute_dtype(x, A_log, dt_bias)
    biased = x.to(dtype) if dt_bias is None else x.to(dtype) + dt_bias.to(dtype)
    return -torch.exp(A_log.to(dtype)) * softplus(biased)


class LogDecayGrads(NamedTuple):
    """Gradients of :func:`delta_log_decay`, each in the dtype and shape of its input."""

    dx: Tensor
    dA_log: Tensor
    ddt_bias: Tensor | None


@full_precision
def delta_log_decay_backward(x: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor) -> LogDecayGrads:
    """The gradients from that of the log decay, dg [B, T, HV]; those per head are sums over B and T."""
    dtype = compute_dtype(x, A_log, dt_bias, dg)
    biased = x.to(dtype) if dt_bias is None else x.to(dtype) + dt_bias.to(dtype)
    rate = torch.exp(A_log.to(dtype))
    # the rate times dg alone may overflow
    dx = -dg.to(dtype) * (rate * torch.sigmoid(biased))
    d_a = -(dg.to(dtype) * (rate * softplus(biased))).sum((0, 1))
    d_bias = None if dt_bias is None else dx.sum((0, 1)).to(dt_bias.dtype)
    return LogDecayGrads(dx.to(x.dtype), d_a.to(A_log.dtype), d_bias)
