"""Gradients of what makes a log decay, -e^{A_log} softplus(g + dt_bias), per head at every rate e^{A_log}."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import softplus

from tfla_tk import chunk_gated_delta_rule, chunk_simple_gla
from tfla_tk.bench import fla
from tfla_tk.reference import delta_log_decay

from .accuracy import GRADIENT_TOLERANCE, relative_error
from .delta_rule import draw
from .linear import Normal, Tensors, draw_cotangents, exact, run, train

RATES = [1e-3, 1.0, 4.0, 16.0, 64.0, 1e3, 1e6, 1e30]
# of a head's gradient, relative to that of o. NOTES: fp16 has no number between 0 and 6e-8, so that it loses
# what nearly closed gates leave
VANISHED = {torch.bfloat16: 1e-4, torch.float16: 2e-4}
NAMES = ("dA_log", "ddt_bias")
HEADS = 32


def in_kernel(**x: Any) -> Any:
    return chunk_gated_delta_rule(**x, use_gate_in_kernel=True)


def by_torch(g: Tensor, A_log: Tensor, dt_bias: Tensor, **x: Any) -> Any:
    return chunk_gated_delta_rule(g=delta_log_decay(g, A_log, dt_bias), **x)


def scalar_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, **x: Any) -> Any:
    return chunk_simple_gla(g=delta_log_decay(g, A_log, dt_bias), **x)


def draw_rates(
    rate: float, function: Any, heads: int, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """In every second head four tokens of ten keep much of the state at any rate."""
    x, normal = draw(2, 1000, heads, dims=dims, dtype=dtype, states=False), Normal(1)
    raw, chosen = normal(*x["g"].shape), normal.uniform(*x["g"].shape) < 0.4
    spared = chosen & (torch.arange(heads, device="cuda") % 2 == 0)
    x["g"] = torch.where(spared, raw - max(math.log(rate), 0) - 1, raw)
    x["A_log"] = torch.full((heads,), math.log(rate), device="cuda")
    x["dt_bias"] = torch.linspace(0.5, -0.5, heads).cuda()
    if function is scalar_decay:
        del x["beta"]
    return x


def errors_of_heads(found: Tensors, truth: Tensors, x: Tensors, do: Tensor) -> dict[str, Tensor]:
    """Of the sums over the tokens, relative to what their terms come to where none cancel: a sum is as
    accurate as its terms, whose errors may have one sign."""
    biased = x["g"].double() + x["dt_bias"].double()
    terms = {"dA_log": truth["dg"] * softplus(biased) / biased.sigmoid(), "ddt_bias": truth["dg"]}
    least = VANISHED[x["q"].dtype] * vector_norm(do.double(), dim=(0, 1, 3))
    return {
        name: (found[name] - truth[name]).abs() / terms[name].abs().sum(dim=(0, 1)).maximum(least)
        for name in NAMES
    }


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("function", [in_kernel, by_torch, scalar_decay], ids=lambda f: f.__name__)
def test_gradients_at_every_rate(
    function: Any, dims: tuple[int, int], rate: float, dtype: torch.dtype
) -> None:
    x = draw_rates(rate, function, HEADS, dims, dtype)
    given = draw_cotangents(run(x, function=function))
    found = train(x, function=function, given=given)
    truth = train(exact(x), "reference", function, [t.double() for t in given])
    assert all(t.isfinite().all() for t in found.values())
    limit = GRADIENT_TOLERANCE[dtype][1]
    assert relative_error(found["dg"], truth["dg"]) <= limit
    for name, errors in errors_of_heads(found, truth, x, given[0]).items():
        for like in (errors[::2], errors[1::2]):  # with the tokens that keep much, without them
            assert like.square().mean().sqrt() <= limit, (name, like)


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("rate", [1e-3, 1.0, 4.0, 16.0, 64.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids="{0[0]}_{0[1]}".format)
def test_no_less_accurate_than_fla(dims: tuple[int, int], rate: float) -> None:
    """Over many heads; or where both errors are so small that chance decides."""
    pytest.importorskip("fla")

    def of_fla(backend: str, **x: Any) -> Any:
        operands = [x.pop(name) for name in ("q", "k", "v", "g", "beta")]
        return fla.call("chunk_gated_delta_rule", *operands, **x, use_gate_in_kernel=True)

    x = draw_rates(rate, in_kernel, HEADS, dims)
    given = draw_cotangents(run(x, function=in_kernel))
    truth = train(exact(x), "reference", in_kernel, [t.double() for t in given])
    found = train(x, function=in_kernel, given=given)
    with fla.lifted_guard("chunk_gated_delta_rule"):
        theirs = train(x, function=of_fla, given=given)
    errors = [errors_of_heads(y, truth, x, given[0]) for y in (found, theirs)]
    chance = GRADIENT_TOLERANCE[torch.bfloat16][1] / 4
    for name in NAMES:
        own, of_theirs = (y[name].square().mean().sqrt() for y in errors)
        assert own <= max(1.1 * of_theirs, chance), (name, own, of_theirs)
