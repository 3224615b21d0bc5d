"""Scalar decay beyond what every operator has: value heads, states with V first, decays per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .conftest import assert_close, linear_drawer

FORMS = ["recurrent", "parallel", "chunkwise"]


def draw(length: int, heads: tuple[int, int]) -> dict[str, Tensor]:
    """q, k of so many heads, v of others, g and an initial state in fp64; K = 8, V = 6."""
    (q, k, v, g), (state,) = linear_drawer("g")(length, heads=max(heads))
    few, many = (slice(count) for count in heads)
    x = {"q": q[:, :, few], "k": k[:, :, few], "v": v[:, :, many], "g": g[..., many]}
    return x | {"initial_state": state[:, many]}


def run(form: str, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = getattr(reference, f"simple_gla_{form}")(**arguments)
    return result


@pytest.mark.parametrize("form", FORMS)
def test_a_value_head_reads_the_key_head_of_its_group(form: str) -> None:
    """Value head h reads key head h // n: as with every key head repeated n times."""
    x = draw(70, (2, 6))
    repeated = x | {name: x[name][:, :, [0, 0, 0, 1, 1, 1]] for name in ("q", "k")}
    o, last = run(form, **x, output_final_state=True)
    expected, expected_last = run("recurrent", **repeated, output_final_state=True)
    assert o.shape == (2, 70, 6, 6)
    assert_close(o, expected)
    assert_close(last, expected_last)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(4, 6), (4, 2)])
def test_uneven_groups_are_refused(form: str, heads: tuple[int, int]) -> None:
    message = rf"v: expected a multiple of q's 4 heads, got {heads[1]}"
    with pytest.raises(ValueError, match=message):
        run(form, **draw(5, heads))
    x = draw(5, heads)
    with pytest.raises(ValueError, match=message):
        reference.simple_gla_backward(x["q"], x["k"], x["v"], x["g"], x["v"])


@pytest.mark.parametrize("form", FORMS)
def test_states_with_v_first(form: str) -> None:
    x = draw(70, (2, 4))
    o, last = run(form, **x, output_final_state=True)
    turned = x | {"initial_state": x["initial_state"].mT.contiguous()}
    o_turned, last_turned = run(form, **turned, output_final_state=True, state_v_first=True)
    assert last_turned is not None and last_turned.shape == (2, 4, 6, 8)
    assert_close(o_turned, o)
    assert_close(last_turned.mT, last)


def test_gradient_of_the_decay_per_head() -> None:
    """That of g_gamma is the sum of dg over batch and tokens."""
    x = draw(70, (2, 4))
    g_gamma = reference.retention_log_decay(4, dtype=torch.float64).requires_grad_()
    do = torch.randn_like(x["v"])
    o, _ = run("recurrent", **{n: t for n, t in x.items() if n != "g"}, g_gamma=g_gamma)
    (expected,) = torch.autograd.grad((o * do).sum(), g_gamma)
    initial = x["initial_state"]
    found = reference.simple_gla_backward(
        x["q"], x["k"], x["v"], None, do, g_gamma=g_gamma.detach(), initial_state=initial
    )
    assert_close(found.dg.sum((0, 1)), expected)
