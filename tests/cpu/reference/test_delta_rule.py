"""The delta rule beyond what every operator has: inputs made from raw ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .conftest import assert_close


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Raw inputs


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_l2_norm(scale: float) -> None:
    """Keys of norm 0 stay 0, and have a gradient."""
    torch.manual_seed(0)
    x = (scale * normal(3, 5, 8)).requires_grad_()
    y = reference.l2_norm(x)
    assert_close(y, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), floor=1e-6)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    assert_close(reference.l2_norm_backward(x.detach(), dy), expected)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_writing_strength(allow_neg_eigval: bool) -> None:
    torch.manual_seed(0)
    x = (5 * normal(2, 7, 3)).requires_grad_()
    beta = reference.writing_strength(x, allow_neg_eigval)
    assert_close(beta, x.sigmoid() * (2 if allow_neg_eigval else 1))
    dbeta = torch.randn_like(beta)
    (expected,) = torch.autograd.grad(beta, x, dbeta)
    assert_close(reference.writing_strength_backward(x.detach(), dbeta, allow_neg_eigval), expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dims", [(), (4,)], ids=["per_head", "per_channel"])
def test_log_decay(dims: tuple[int, ...], lower_bound: float | None, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, a_log, bias = (
        t.requires_grad_() for t in (8 * normal(2, 7, 3, *dims), normal(3), normal(*dims, 3).flatten())
    )
    given = bias if with_bias else None
    g = reference.delta_log_decay(x, a_log, given, lower_bound)
    biased = x + bias.view(3, *dims) if with_bias else x
    rate = a_log.exp().view(3, *[1] * len(dims))
    soft = -rate * torch.log1p(torch.exp(biased))
    assert_close(g, soft if lower_bound is None else lower_bound / (1 + torch.exp(-rate * biased)))
    dg = torch.randn_like(g)
    inputs = [x, a_log, *([bias] if with_bias else [])]
    expected = torch.autograd.grad(g, inputs, dg)
    detached = [None if t is None else t.detach() for t in (x, a_log, given)]
    found = reference.delta_log_decay_backward(*detached, dg, lower_bound)
    assert (found.ddt_bias is None) != with_bias
    for actual, want in zip(found, expected, strict=False):
        assert_close(actual, want)


def test_log_decay_of_a_lower_bound_alone() -> None:
    """Without A_log the rate is 1, and has no gradient."""
    torch.manual_seed(0)
    x = (8 * normal(2, 7, 3, 4)).requires_grad_()
    g = reference.delta_log_decay(x, None, lower_bound=-5.0)
    assert_close(g, -5 * x.sigmoid())
    dg = torch.randn_like(g)
    found = reference.delta_log_decay_backward(x.detach(), None, None, dg, -5.0)
    assert_close(found.dx, torch.autograd.grad(g, x, dg)[0])
    assert found.dA_log is None and found.ddt_bias is None


def test_raw_inputs_are_computed_in_fp32() -> None:
    x = torch.randn(2, 5, 8).bfloat16()
    for y in (reference.l2_norm(x), reference.writing_strength(x), reference.delta_log_decay(x, x[0, 0])):
        assert y.dtype == torch.float32
    assert reference.l2_norm_backward(x, x.float()).dtype == torch.bfloat16
    assert reference.writing_strength_backward(x, x.float()).dtype == torch.bfloat16
