"""The explicit backwards of the operators in [B, T, H, D] against autograd of their recurrences."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import reference

from .conftest import assert_close, linear_drawer

Tensors = dict[str, Tensor]
# of each family its gates as linear_drawer has them, and by their names
GATES = {
    "simple_gla": {"g": "g"},
    "gla": {"g": "G"},
    "gated_delta_rule": {"g": "g", "beta": "b"},
    "kda": {"g": "G", "beta": "b"},
}
OF_FAMILIES = pytest.mark.parametrize("family", GATES)


def draw(family: str, length: int, *, groups: int = 2, rows: int | None = None, **options: Any) -> Tensors:
    """Tokens and an initial state in fp64; K = 8, V = 6."""
    groups = 1 if family == "gla" else groups
    drawer = linear_drawer("".join(GATES[family].values()), groups)
    tokens, states = drawer(length, **options)
    if rows is not None:
        states = drawer(1, seed=1, **options | {"batch": rows})[1]
    return dict(zip(("q", "k", "v", *GATES[family], "initial_state"), tokens + states, strict=True))


def cotangents(x: Tensors) -> tuple[Tensor, Tensor]:
    return torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])


def autograd(family: str, x: Tensors, do: Tensor, dht: Tensor | None, **options: Any) -> Tensors:
    """Gradients of the recurrence."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, last = getattr(reference, f"{family}_recurrent")(**leaves, **options, output_final_state=True)
    loss = (o * do).sum() + (0 if dht is None else (last * dht).sum())
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def explicit(family: str, x: Tensors, do: Tensor, dht: Tensor | None, **options: Any) -> Tensors:
    *tokens, initial = x.values()
    grads = getattr(reference, f"{family}_backward")(*tokens, do, dht, initial_state=initial, **options)
    return dict(zip(x, grads, strict=True))


@OF_FAMILIES
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 64), (63, 16), (65, 64), (100, 7), (100, 128)])
@pytest.mark.parametrize("with_last", [False, True], ids=["o", "o_and_state"])
def test_gradients(
    family: str, heads: int, groups: int, length: int, chunk_size: int, with_last: bool
) -> None:
    x = draw(family, length, heads=heads, groups=groups)
    do, dht = cotangents(x)
    given = do, dht if with_last else None
    actual = explicit(family, x, *given, scale=0.3, chunk_size=chunk_size)
    assert_close(actual, autograd(family, x, *given, scale=0.3))


@OF_FAMILIES
@pytest.mark.parametrize("offsets", [[0, 0, 1, 37, 37, 100], [0, 100]])
def test_packed_sequences(family: str, offsets: list[int]) -> None:
    x = draw(family, 100, batch=1, rows=len(offsets) - 1)
    options = {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    given = cotangents(x)
    actual = explicit(family, x, *given, **options, chunk_size=16)
    assert_close(actual, autograd(family, x, *given, **options))


def test_states_with_v_first() -> None:
    x = draw("simple_gla", 70)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    of = partial(explicit, "simple_gla"), partial(autograd, "simple_gla")
    given = cotangents(x)
    assert_close(*(gradients(x, *given, state_v_first=True) for gradients in of))


@OF_FAMILIES
@pytest.mark.parametrize("decay", [0.0, -1e-4, -50.0, -1e3, -1e5, -math.inf])
@pytest.mark.parametrize("channel", [slice(None), slice(3, 4)], ids=["all", "one"])
def test_extreme_decay(family: str, decay: float, channel: slice) -> None:
    """Of all channels or heads, or of a single one."""
    x = draw(family, 40, groups=1)
    x["g"][:, 7:23:5, ..., channel if "G" in GATES[family].values() else slice(channel.start and 1, None)] = (
        decay
    )
    given = cotangents(x)
    assert_close(explicit(family, x, *given, chunk_size=16), autograd(family, x, *given))


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 1.0, 1.9])
def test_any_writing_strength(family: str, beta: float) -> None:
    """Up to 2, where I - beta k k^T has a negative eigenvalue; and with a key that repeats."""
    x = draw(family, 40, groups=1)
    x["g"].zero_()
    x["beta"].fill_(beta)
    x["k"][:, 5:12] = x["k"][:, 5:6]
    given = cotangents(x)
    actual = explicit(family, x, *given, chunk_size=16)
    assert_close(actual, autograd(family, x, *given), floor=1e-6)


@OF_FAMILIES
def test_gradients_have_the_dtypes_of_their_inputs(family: str) -> None:
    dtypes = dict.fromkeys("qkv", torch.bfloat16)
    x = {name: t.to(dtypes.get(name, torch.float32)) for name, t in draw(family, 20).items()}
    found = explicit(family, x, torch.randn_like(x["v"]), None)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in x.items()
    }


@OF_FAMILIES
def test_no_token(family: str) -> None:
    x = draw(family, 0)
    _, dht = cotangents(x)
    found = explicit(family, x, x["v"], dht)
    assert found["q"].shape == (2, 0, 2, 8) and torch.equal(found["initial_state"], dht)
