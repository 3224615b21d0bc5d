"""A token that is not finite, on the GPU: what has nothing to do with it stays as it was, bit for bit.

Packed sequences beside one of NaN: test_calls.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .decoding import GATES, Decoder
from .mlstm import draw_packed, make_inputs

Tensors = dict[str, Tensor]
CutEvery = Callable[[int], None]

DIMS = [(64, 64), (128, 256), (256, 512)]
BAD = [math.nan, math.inf]
TOKENS = ("q", "k", "v", "i", "f")


def poison(x: Tensors, name: str, at: int, value: float) -> Tensors:
    """x with `value` in one number of token `at` of the last batch entry's middle head."""
    x = x | {name: x[name].clone()}
    x[name][-1, 1, at : at + 1].view(-1)[x[name][-1, 1, at : at + 1].numel() // 2] = value
    return x


def outputs(operator: Any, x: Tensors, cotangents: Tensors) -> Tensors:
    """h, the last state and the gradients."""
    found = operator.run(x)
    return found | {f"d{name}": grad for name, grad in operator.gradients(x, cotangents).items()}


def assert_equal(found: Tensors, clean: Tensors, part: Callable[[str, Tensor], Tensor]) -> None:
    for name, x in clean.items():
        own, want = part(name, found[name]), part(name, x)
        assert want.isfinite().all() and torch.equal(own, want), name


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("chunks", [1, 100])
def test_other_heads_batch_entries_and_earlier_chunks(
    operator: Any, dtype: torch.dtype, chunks: int, dims: tuple[int, int], cut_every: CutEvery
) -> None:
    cut_every(chunks)
    x = make_inputs(2, 3, 300, dims, dtype, operator.states)
    cotangents = operator.draw_cotangents(x, True)
    clean = outputs(operator, x, cotangents)
    for name, value in itertools.product(TOKENS, BAD):
        found = outputs(operator, poison(x, name, 100, value), cotangents)
        assert not torch.equal(found["h"], clean["h"])
        assert_equal(found, clean, lambda _, t: t[0])
        assert_equal(found, clean, lambda _, t: t[:, [0, 2]])
        assert_equal({"h": found["h"]}, {"h": clean["h"]}, lambda _, t: t[:, :, :64])
    assert_equal(outputs(operator, x, cotangents), clean, lambda _, t: t)


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
def test_a_cotangent_that_is_not_finite(operator: Any, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """In dh of one packed sequence: the gradients of its neighbours and of the next call."""
    x = draw_packed(operator, [100, 90, 200], dims, dtype)
    cotangents = operator.draw_cotangents(x, True)
    clean = operator.gradients(x, cotangents)

    def outside(name: str, t: Tensor) -> Tensor:
        if name.endswith("_initial"):
            return t[[0, 2]]
        return torch.cat([t[:, :, :100], t[:, :, 190:]], 2)

    for value in BAD:
        found = operator.gradients(x, cotangents | {"h": poison(cotangents, "h", 120, value)["h"]})
        assert not found["v"].isfinite().all()
        assert_equal(found, clean, outside)
        assert_equal(found, clean, lambda _, t: t[:, [0, 2]])
    assert_equal(operator.gradients(x, cotangents), clean, lambda _, t: t)


@pytest.mark.parametrize("dims", [*DIMS, (17, 31)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("gate", ["exp", "sig"])
@pytest.mark.parametrize(("tokens", "at"), [(None, 0), (5, 2)], ids=["step", "sequence"])
def test_decoding(gate: str, tokens: int | None, at: int, dims: tuple[int, int]) -> None:
    """Other heads and batch entries; and the next call."""
    decoder = Decoder(*GATES[gate], tokens)
    x = decoder.draw(dims=dims)
    clean = decoder(x)
    for name, value in itertools.product(TOKENS, BAD):
        found = decoder(poison(x, name, at, value))
        assert not all(torch.equal(found[name], clean[name]) for name in found)
        assert_equal(found, clean, lambda _, t: t[0])
        assert_equal(found, clean, lambda _, t: t[:, [0, 2]])
    assert_equal(decoder(x), clean, lambda _, t: t)
