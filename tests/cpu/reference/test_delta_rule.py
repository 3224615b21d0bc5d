"""The delta rule beyond what every operator has: the explicit backward, and inputs made from raw ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import reference

Check = Callable[..., None]
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
HEADS = [(2, 2), (2, 6), (1, 4)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw(length: int, heads: tuple[int, int], batch: int = 2, rows: int | None = None) -> dict[str, Tensor]:
    """q, k of norm 1, v, g, beta and an initial state in fp64; K = 8, V = 6."""
    torch.manual_seed(0)
    few, many = heads
    return {
        "q": normal(batch, length, few, 8),
        "k": normalize(normal(batch, length, few, 8), dim=-1),
        "v": normal(batch, length, many, 6),
        "g": logsigmoid(normal(batch, length, many)),
        "beta": torch.sigmoid(normal(batch, length, many)),
        "initial_state": normal(rows or batch, many, 8, 6),
    }


def autograd(x: dict[str, Tensor], do: Tensor, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """Gradients of the recurrence."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, last = reference.gated_delta_rule_recurrent(**leaves, **options, output_final_state=True)
    assert last is not None
    loss = (o * do).sum() + (0 if dht is None else (last * dht).sum())
    return dict(zip(NAMES, torch.autograd.grad(loss, [leaves[n] for n in NAMES]), strict=True))


def explicit(x: dict[str, Tensor], do: Tensor, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    tokens = [x[name] for name in NAMES[:-1]]
    grads = reference.gated_delta_rule_backward(*tokens, do, dht, initial_state=x["initial_state"], **options)
    return dict(zip(NAMES, grads, strict=True))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 64), (63, 16), (65, 64), (100, 7), (100, 128)])
@pytest.mark.parametrize("with_last", [False, True], ids=["o", "o_and_state"])
def test_explicit_gradients(
    heads: tuple[int, int], length: int, chunk_size: int, with_last: bool, assert_close: Check
) -> None:
    x = draw(length, heads)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"]) if with_last else None
    actual = explicit(x, do, dht, scale=0.3, chunk_size=chunk_size)
    assert_close(actual, autograd(x, do, dht, scale=0.3))


@pytest.mark.parametrize("offsets", [[0, 0, 1, 37, 37, 100], [0, 100]])
def test_explicit_gradients_of_packed_sequences(offsets: list[int], assert_close: Check) -> None:
    x = draw(100, (2, 4), batch=1, rows=len(offsets) - 1)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    actual = explicit(x, do, dht, cu_seqlens=cu_seqlens, chunk_size=16)
    assert_close(actual, autograd(x, do, dht, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("decay", [0.0, -50.0, -1e4, -math.inf])
def test_explicit_gradients_of_extreme_decay(decay: float, assert_close: Check) -> None:
    x = draw(40, (2, 2))
    x["g"][:, 7:23:5] = decay
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    assert_close(explicit(x, do, dht, chunk_size=16), autograd(x, do, dht))


@pytest.mark.parametrize("beta", [0.0, 1e-3, 1.0, 1.9])
def test_explicit_gradients_of_any_writing_strength(beta: float, assert_close: Check) -> None:
    """Up to 2, where I - beta k k^T has a negative eigenvalue; and with a key that repeats."""
    x = draw(40, (2, 2))
    x["g"].zero_()
    x["beta"].fill_(beta)
    x["k"][:, 5:12] = x["k"][:, 5:6]
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    assert_close(explicit(x, do, dht, chunk_size=16), autograd(x, do, dht), floor=1e-6)


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    x = draw(20, (2, 4))
    dtypes = dict.fromkeys("qkv", torch.bfloat16)
    x = {name: t.to(dtypes.get(name, torch.float32)) for name, t in x.items()}
    found = explicit(x, torch.randn_like(x["v"]), None)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in x.items()
    }


def test_no_token() -> None:
    x = draw(0, (2, 4))
    dht = torch.randn_like(x["initial_state"])
    found = explicit(x, x["v"], dht)
    assert found["q"].shape == (2, 0, 2, 8) and torch.equal(found["initial_state"], dht)


# The terms of a chunk


def test_terms_of_a_chunk_give_output_and_state(assert_close: Check) -> None:
    torch.manual_seed(0)
    q, k = normal(1, 2, 20, 8), normalize(normal(1, 2, 20, 8), dim=-1)
    v, g, beta = normal(1, 2, 20, 6), logsigmoid(normal(1, 2, 20)), torch.sigmoid(normal(1, 2, 20))
    s = normal(1, 2, 8, 6)
    found = reference.delta_rule_chunk_forward(q, k, v, g, beta, s)
    o = found.scores @ found.writes + found.through * (q @ s)
    first = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    expected, _ = reference.gated_delta_rule_recurrent(*first, scale=1.0, initial_state=s)
    assert_close(o.transpose(1, 2), expected)


# Raw inputs


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_l2_norm(scale: float, assert_close: Check) -> None:
    """Keys of norm 0 stay 0, and have a gradient."""
    torch.manual_seed(0)
    x = (scale * normal(3, 5, 8)).requires_grad_()
    y = reference.l2_norm(x)
    assert_close(y, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), floor=1e-6)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    assert_close(reference.l2_norm_backward(x.detach(), dy), expected)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_writing_strength(allow_neg_eigval: bool, assert_close: Check) -> None:
    torch.manual_seed(0)
    x = (5 * normal(2, 7, 3)).requires_grad_()
    beta = reference.writing_strength(x, allow_neg_eigval)
    assert_close(beta, x.sigmoid() * (2 if allow_neg_eigval else 1))
    dbeta = torch.randn_like(beta)
    (expected,) = torch.autograd.grad(beta, x, dbeta)
    assert_close(reference.writing_strength_backward(x.detach(), dbeta, allow_neg_eigval), expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_log_decay(with_bias: bool, assert_close: Check) -> None:
    torch.manual_seed(0)
    x, a_log, bias = (t.requires_grad_() for t in (8 * normal(2, 7, 3), normal(3), normal(3)))
    given = bias if with_bias else None
    g = reference.delta_log_decay(x, a_log, given)
    assert_close(g, -a_log.exp() * torch.log1p(torch.exp(x + bias if with_bias else x)))
    dg = torch.randn_like(g)
    inputs = [x, a_log, *([bias] if with_bias else [])]
    expected = torch.autograd.grad(g, inputs, dg)
    detached = [None if t is None else t.detach() for t in (x, a_log, given)]
    found = reference.delta_log_decay_backward(*detached, dg)
    assert (found.ddt_bias is None) != with_bias
    for actual, want in zip(found, expected, strict=False):
        assert_close(actual, want)


def test_raw_inputs_are_computed_in_fp32() -> None:
    x = torch.randn(2, 5, 8).bfloat16()
    for y in (reference.l2_norm(x), reference.writing_strength(x), reference.delta_log_decay(x, x[0, 0])):
        assert y.dtype == torch.float32
    assert reference.l2_norm_backward(x, x.float()).dtype == torch.bfloat16
    assert reference.writing_strength_backward(x, x.float()).dtype == torch.bfloat16
