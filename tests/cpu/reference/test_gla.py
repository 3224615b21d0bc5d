"""GLA beyond what every operator has: transforms of what is recomputed, and scores by levels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import logsigmoid

from tfla_tk import reference

from .conftest import assert_close


def draw(length: int, batch: int = 2, rows: int | None = None) -> dict[str, Tensor]:
    """q, k, v, g and an initial state in fp64; 2 heads, K = 8, V = 6."""
    torch.manual_seed(0)
    shapes = {"q": (batch, length, 2, 8), "k": (batch, length, 2, 8), "v": (batch, length, 2, 6)}
    shapes |= {"g": (batch, length, 2, 8), "initial_state": (rows or batch, 2, 8, 6)}
    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return found | {"g": logsigmoid(found["g"])}


def dual(run: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> Any:
    """The result and its tangent, by dual numbers."""
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda run, x: torch.func.vmap(run)(torch.stack((x, 2 * x))),
    "vmap of grad": lambda run, x: torch.func.vmap(torch.func.grad(lambda y: run(y).sum()))(x[None]),
    "compiled grad": lambda run, x: torch.compile(
        lambda y: torch.func.grad(lambda z: run(z).sum())(y), backend="aot_eager", fullgraph=True
    )(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x + 1,)),
    "dual numbers": lambda run, x: dual(run, x, x + 1),
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str, recorded: bool) -> None:
    """Those of the chunkwise form, which recomputes, as of the recurrent one; autograd around them, too."""
    x = draw(40)
    q = x.pop("q").requires_grad_(recorded)
    found = []
    for form in (partial(reference.gla_chunkwise, chunk_size=16), reference.gla_recurrent):
        results = TRANSFORMS[transform](lambda q, form=form: form(q, **x)[0], q)
        results = list(results) if isinstance(results, tuple) else [results]
        results += torch.autograd.grad(results[0].square().sum(), q) if results[0].requires_grad else ()
        found.append(results)
    assert len(found[0]) == len(found[1])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


# Levels


@pytest.mark.parametrize("length", [1, 2, 16, 64])
@pytest.mark.parametrize("hard", [False, True])
def test_scores_by_levels(length: int, hard: bool) -> None:
    """Exact for any gates, and no factor above 1."""
    torch.manual_seed(0)
    q, k, g = (torch.randn(3, length, 8, dtype=torch.float64) for _ in range(3))
    g = logsigmoid(g)
    if hard:
        g[:, ::3, 2], g[:, 1::4], g[:, 3::5, 5] = -1000.0, 0.0, -50.0
    b = g.cumsum(-2)
    expected = torch.einsum("btc,bjc,btjc->btj", q, k, torch.exp(b[:, :, None] - b[:, None])).tril()
    levels = reference.gla_levels(q, k, g)
    assert [level.half for level in levels] == [2**n for n in range(int(math.log2(length)))]
    found = torch.diag_embed((q * k).sum(-1))
    for level in levels:
        found = found + level.mask * (level.operand @ level.operand.mT)
        assert (level.operand.abs() <= torch.maximum(q.abs(), k.abs())).all()
    if not hard:
        assert_close(found, expected)
        return
    # e^{b_t - b_j} itself loses digits there: token by token
    steps = torch.exp(g)
    for t in range(length):
        weight = torch.ones(3, 8, dtype=torch.float64)
        for j in range(t, -1, -1):
            torch.testing.assert_close(found[:, t, j], (q[:, t] * weight * k[:, j]).sum(-1))
            weight = weight * steps[:, j]


def test_levels_want_a_power_of_two() -> None:
    x = torch.zeros(2, 48, 8)
    with pytest.raises(ValueError, match="q: expected a power of two tokens, got 48"):
        reference.gla_levels(x, x, x)
