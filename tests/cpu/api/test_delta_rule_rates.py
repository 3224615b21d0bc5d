"""Gradients of what makes the log decay, -e^{A_log} softplus(g + dt_bias), at every rate e^{A_log}."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_gated_delta_rule

from .delta_rule import draw
from .linear import Inputs

TOKENS, HEADS = 1024, 4
RATES = [1e-3, 1.0, 4.0, 16.0, 64.0, 1e3, 1e6, 1e30]
NAMES = ("g", "A_log", "dt_bias")


def draw_rates(rate: float) -> Inputs:
    """In fp32. In heads 0 and 2 some tokens keep much of the state at any rate."""
    x = draw(batch=1, seq=TOKENS, heads=(HEADS, HEADS), dims=(16, 16), dtype=torch.float32)
    del x["initial_state"]
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(1, TOKENS, HEADS, generator=generator)
    kept = (torch.rand(1, TOKENS, HEADS, generator=generator) < 0.4) & (torch.arange(HEADS) % 2 == 0)
    a_log, dt_bias = torch.full((HEADS,), math.log(rate)), torch.linspace(0.5, -0.5, HEADS)
    g = torch.where(kept, raw - a_log.clamp(min=0) - 1, raw)
    return x | {"g": g, "A_log": a_log, "dt_bias": dt_bias}


def by_op(*, q: Tensor, k: Tensor, v: Tensor, **x: Tensor) -> Any:
    """The registered op, which computes as the reference on a CPU."""
    tensors = [q, k, v, *(x[name] for name in ("g", "beta", "A_log", "dt_bias"))]
    options = (q.shape[-1] ** -0.5, False, False, False, False, False)
    return torch.ops.tfla_tk.delta_rule_fwd(*tensors, None, None, *options)[0]


def by_function(**x: Tensor) -> Any:
    function = functools.partial(chunk_gated_delta_rule, use_gate_in_kernel=True, backend="reference")
    return function(**x)[0]


def packed_and_compiled(**x: Tensor) -> Any:
    compiled = torch.compile(by_function, backend="aot_eager", fullgraph=True)
    return compiled(**x, cu_seqlens=torch.tensor([0, TOKENS]))


def gradients(function: Any, x: Inputs) -> Inputs:
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(2)).to(x["v"].dtype)
    found = torch.autograd.grad(function(**leaves), [leaves[name] for name in NAMES], do)
    return dict(zip(NAMES, found, strict=True))


@functools.cache
def truth(rate: float) -> Inputs:
    return gradients(by_function, {name: t.double() for name, t in draw_rates(rate).items()})


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("function", [by_op, by_function, packed_and_compiled], ids=lambda f: f.__name__)
def test_gradients_at_every_rate(function: Any, rate: float) -> None:
    """Per head as accurate as fp32 allows, also where next to nothing passes from token to token."""
    found, expected = gradients(function, draw_rates(rate)), truth(rate)
    torch._dynamo.reset()
    for name in NAMES:
        of_heads = found[name].double().view(-1, HEADS), expected[name].view(-1, HEADS)
        error, size = (of_heads[0] - of_heads[1]).norm(dim=0), of_heads[1].norm(dim=0)
        assert found[name].isfinite().all(), name
        # below the range of fp32 nothing is left
        assert (error <= 1e-5 * size + 1e-30).all(), (name, error / size)
