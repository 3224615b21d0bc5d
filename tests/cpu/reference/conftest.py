"""Every operator of the reference behind one interface, and how to draw its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import reference

Tensors = list[Tensor]


@dataclass(frozen=True)
class Operator:
    """One operator: ``run`` maps (form, tokens, state) to (output, last state)."""

    name: str
    run: Callable[..., tuple[Tensor, Tensors]]
    draw: Callable[..., tuple[Tensors, Tensors]]
    time_dim: int
    #: how many of the state tensors carry a gradient
    differentiable: int

    def __str__(self) -> str:
        return self.name

    def evaluate(self, form: str, tokens: Tensors, state: Tensors, **options: Any) -> dict[str, Tensor]:
        """Output, last state, and the gradients of a loss that reaches both."""
        tokens = [x.detach().clone().requires_grad_() for x in tokens]
        state = [x.detach().clone().requires_grad_() for x in state]
        out, last = self.run(form, tokens, state, **options)
        reached = [out, *last[: self.differentiable]]
        generator = torch.Generator().manual_seed(7)
        weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in reached]
        grads = torch.autograd.grad(reached, tokens + state[: self.differentiable], weights)
        results = {"out": out, **{f"last{j}": x for j, x in enumerate(last)}}
        results.update({f"grad{j}": x for j, x in enumerate(grads)})
        return {name: x.detach() for name, x in results.items()}


def split_form(form: str) -> tuple[str, dict[str, int]]:
    """ "chunkwise_16" -> ("chunkwise", {"chunk_size": 16})."""
    name, _, size = form.partition("_")
    return name, ({"chunk_size": int(size)} if size else {})


def run_mlstm(form: str, tokens: Tensors, state: Tensors, **options: Any) -> tuple[Tensor, Tensors]:
    name, size = split_form(form)
    function = getattr(reference, f"mlstm_{name}")
    h, last = function(*tokens, *(state or (None, None, None)), return_last_states=True, **size, **options)
    return h, list(last)


def run_siging(form: str, tokens: Tensors, state: Tensors, **options: Any) -> tuple[Tensor, Tensors]:
    name, size = split_form(form)
    function = getattr(reference, f"mlstm_siging_{name}")
    h, last = function(*tokens, *(state or (None, None)), return_last_states=True, **size, **options)
    return h, list(last)


def run_siging_unnormalised(
    form: str, tokens: Tensors, state: Tensors, **options: Any
) -> tuple[Tensor, Tensors]:
    name, size = split_form(form)
    function = getattr(reference, f"mlstm_siging_{name}")
    h, (c, _) = function(
        *tokens,
        c_initial=state[0] if state else None,
        return_last_states=True,
        normalize=False,
        **size,
        **options,
    )
    return h, [c]


def linear_runner(family: str) -> Callable[..., tuple[Tensor, Tensors]]:
    def run(form: str, tokens: Tensors, state: Tensors, **options: Any) -> tuple[Tensor, Tensors]:
        name, size = split_form(form)
        initial = state[0] if state else None
        function = getattr(reference, f"{family}_{name}")
        o, last = function(*tokens, initial_state=initial, output_final_state=True, **size, **options)
        return o, [last]

    return run


def draw_mlstm(
    length: int,
    *,
    batch: int = 2,
    heads: int = 2,
    dims: tuple[int, int] = (8, 6),
    seed: int = 0,
    states: int = 3,
) -> tuple[Tensors, Tensors]:
    """(q, k, v, i, f) and the first ``states`` of (c, n, m) in fp64; forget gates around 3."""
    torch.manual_seed(seed)
    dim_qk, dim_v = dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    gate = (batch, heads, length)
    tokens = [normal(*gate, dim_qk), normal(*gate, dim_qk), normal(*gate, dim_v)]
    tokens += [2 * normal(*gate), 3 + 2 * normal(*gate)]
    state = [normal(batch, heads, dim_qk, dim_v), normal(batch, heads, dim_qk), normal(batch, heads, 1)]
    return tokens, state[:states]


def linear_drawer(gates: str, groups: int = 1) -> Callable[..., tuple[Tensors, Tensors]]:
    """Draws q, k, v and the named gates: "g" scalar decay, "G" decay per channel, "b" writing strength."""

    def draw(
        length: int, *, batch: int = 2, heads: int = 2, dims: tuple[int, int] = (8, 6), seed: int = 0
    ) -> tuple[Tensors, Tensors]:
        torch.manual_seed(seed)
        dim_qk, dim_v = dims

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64)

        outer = (batch, length, groups * heads)
        k = normal(batch, length, heads, dim_qk)
        tokens = [normal(*k.shape), normalize(k, dim=-1) if "b" in gates else k, normal(*outer, dim_v)]
        draws = {
            "g": lambda: logsigmoid(normal(*outer)),
            "G": lambda: logsigmoid(normal(*outer, dim_qk)),
            "b": lambda: torch.sigmoid(normal(*outer)),
        }
        tokens += [draws[name]() for name in gates]
        return tokens, [normal(batch, groups * heads, dim_qk, dim_v)]

    return draw


OPERATORS = [
    Operator("mlstm_exp", run_mlstm, draw_mlstm, 2, 2),
    Operator("mlstm_sig", run_siging, partial(draw_mlstm, states=2), 2, 2),
    Operator("mlstm_sig_unnormalised", run_siging_unnormalised, partial(draw_mlstm, states=1), 2, 1),
    Operator("simple_gla", linear_runner("simple_gla"), linear_drawer("g"), 1, 1),
    Operator("simple_gla_groups", linear_runner("simple_gla"), linear_drawer("g", groups=2), 1, 1),
    Operator("gla", linear_runner("gla"), linear_drawer("G"), 1, 1),
    Operator("delta_rule", linear_runner("delta_rule"), linear_drawer("b"), 1, 1),
    Operator("gated_delta_rule", linear_runner("gated_delta_rule"), linear_drawer("gb"), 1, 1),
    Operator("gated_delta_groups", linear_runner("gated_delta_rule"), linear_drawer("gb", groups=2), 1, 1),
    Operator("kda", linear_runner("kda"), linear_drawer("Gb", groups=2), 1, 1),
]


@pytest.fixture(params=OPERATORS, ids=str)
def operator(request: pytest.FixtureRequest) -> Operator:
    return request.param


@pytest.fixture(params=[x for x in OPERATORS if x.name not in ("mlstm_exp", "delta_rule")], ids=str)
def decaying_operator(request: pytest.FixtureRequest) -> Operator:
    """Those whose decay is a gate without a stabiliser."""
    return request.param


def assert_close(
    actual: object, expected: object, tol: float = 1e-10, floor: float = 0.0, name: str = ""
) -> None:
    """Relative Frobenius error of tensors, or of groups of them; ``floor`` bounds the norm from below."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict) and actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(actual[key], value, tol, floor, f"{name} {key}".strip())
        return
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple))
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_close(one, other, tol, floor, f"{name} {number}")
        return
    assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    assert torch.isfinite(actual).all() and torch.isfinite(expected).all(), f"{name}: not finite"
    norm = max(expected.double().norm().item(), floor)
    error = (actual.double() - expected.double()).norm().item()
    assert error <= tol * norm, f"{name}: relative error {error / norm if norm else float('inf'):.2e} > {tol}"
