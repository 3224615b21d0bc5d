"""Scalar decay beyond what every operator has: value heads, states with V first, the explicit backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import reference

Check = Callable[..., None]

FORMS = ["recurrent", "parallel", "chunkwise"]
HEADS = [(2, 2), (2, 6), (1, 4)]


def draw(length: int, heads: tuple[int, int], batch: int = 2, rows: int | None = None) -> dict[str, Tensor]:
    """q, k, v, g and an initial state in fp64; K = 8, V = 6."""
    torch.manual_seed(0)
    few, many = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "q": normal(batch, length, few, 8),
        "k": normal(batch, length, few, 8),
        "v": normal(batch, length, many, 6),
        "g": logsigmoid(normal(batch, length, many)),
        "initial_state": normal(rows or batch, many, 8, 6),
    }


def run(form: str, **arguments: Any) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = getattr(reference, f"simple_gla_{form}")(**arguments)
    return result


@pytest.mark.parametrize("form", FORMS)
def test_a_value_head_reads_the_key_head_of_its_group(form: str, assert_close: Check) -> None:
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
def test_states_with_v_first(form: str, assert_close: Check) -> None:
    x = draw(70, (2, 4))
    o, last = run(form, **x, output_final_state=True)
    turned = x | {"initial_state": x["initial_state"].mT.contiguous()}
    o_turned, last_turned = run(form, **turned, output_final_state=True, state_v_first=True)
    assert last_turned is not None and last_turned.shape == (2, 4, 6, 8)
    assert_close(o_turned, o)
    assert_close(last_turned.mT, last)


def autograd(x: dict[str, Tensor], do: Tensor, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    """Gradients of the recurrence."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, last = run("recurrent", **leaves, **options, output_final_state=True)
    assert last is not None
    loss = (o * do).sum() + (0 if dht is None else (last * dht).sum())
    names = ("q", "k", "v", "g", "initial_state")
    return dict(zip(names, torch.autograd.grad(loss, [leaves[n] for n in names]), strict=True))


def explicit(x: dict[str, Tensor], do: Tensor, dht: Tensor | None, **options: Any) -> dict[str, Tensor]:
    grads = reference.simple_gla_backward(
        x["q"], x["k"], x["v"], x["g"], do, dht, initial_state=x["initial_state"], **options
    )
    return dict(zip(("q", "k", "v", "g", "initial_state"), grads, strict=True))


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


def test_explicit_gradients_with_v_first(assert_close: Check) -> None:
    x = draw(70, (2, 4))
    x["initial_state"] = x["initial_state"].mT.contiguous()
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    assert_close(explicit(x, do, dht, state_v_first=True), autograd(x, do, dht, state_v_first=True))


def test_gradient_of_the_decay_per_head(assert_close: Check) -> None:
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


@pytest.mark.parametrize("decay", [0.0, -50.0, -1e4, -math.inf])
def test_explicit_gradients_of_extreme_decay(decay: float, assert_close: Check) -> None:
    x = draw(40, (2, 2))
    x["g"][:, 7:23:5] = decay
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    actual, expected = explicit(x, do, dht, chunk_size=16), autograd(x, do, dht)
    assert_close(actual, expected)


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    x = draw(20, (2, 4))
    dtypes = {"q": torch.bfloat16, "k": torch.bfloat16, "v": torch.bfloat16, "g": torch.float32}
    x = {name: t.to(dtypes.get(name, torch.float32)) for name, t in x.items()}
    found = explicit(x, torch.randn_like(x["v"]), None)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in x.items()}
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in x.items()}


def test_no_token() -> None:
    x = draw(0, (2, 4))
    dht = torch.randn_like(x["initial_state"])
    found = explicit(x, x["v"], dht)
    assert found["q"].shape == (2, 0, 2, 8) and torch.equal(found["initial_state"], dht)
