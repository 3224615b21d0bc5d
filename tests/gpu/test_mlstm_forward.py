"""mLSTM forward on the GPU against the fp64 reference: head dims, lengths, states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .memory import TOKENS

Make = Callable[..., dict[str, Tensor]]
Check = Callable[..., None]

SIZES = [(1, 1, 1), (1, 2, 63), (2, 3, 1000)]
NATIVE = list(itertools.product((64, 128, 256), (64, 128, 256, 512)))
PADDED = [(16, 16), (48, 80), (96, 96), (160, 384), (208, 176)]
MAIN = [(64, 64), (128, 128), (128, 256), (256, 512)]


@pytest.mark.parametrize("dims", NATIVE, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("size", SIZES, ids="B{0[0]}_NH{0[1]}_S{0[2]}".format)
def test_native_head_dims(
    operator: Any,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    dims: tuple[int, int],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    x = make_inputs(*size, dims, dtype)
    assert_accurate(operator.run(x), operator.truth(x))


@pytest.mark.parametrize("dims", PADDED, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("seq", [1, 64, 130])
def test_padded_head_dims(
    operator: Any,
    dtype: torch.dtype,
    seq: int,
    dims: tuple[int, int],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    x = make_inputs(2, 3, seq, dims, dtype, operator.states)
    assert_accurate(operator.run(x), operator.truth(x))


@pytest.mark.parametrize("dims", NATIVE, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("seq", [1, 65, 300])
def test_initial_state(
    operator: Any,
    dtype: torch.dtype,
    seq: int,
    dims: tuple[int, int],
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    x = make_inputs(2, 2, seq, dims, dtype, operator.states)
    assert_accurate(operator.run(x), operator.truth(x))


@pytest.mark.parametrize("dims", MAIN, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("split", [1, 63, 64, 337, 999])
def test_two_calls_with_the_state_passed_equal_one(
    operator: Any, split: int, dims: tuple[int, int], make_inputs: Make, assert_accurate: Check
) -> None:
    x = make_inputs(2, 3, 1000, dims, states=operator.states)
    first = operator.run({name: t[:, :, :split] if name in TOKENS else t for name, t in x.items()})
    state = {name: first[name[0]] for name in operator.states}
    second = operator.run({name: x[name][:, :, split:] for name in TOKENS} | state)
    whole = torch.cat((first["h"], second["h"]), dim=2)
    truth = operator.truth(x)
    # passing the state leaves its own rounding
    assert_accurate(second | {"h": whole}, truth)
    assert_accurate(operator.run(x), truth)


def test_the_state_is_only_computed_on_request(operator: Any, make_inputs: Make) -> None:
    x = make_inputs()
    h = operator(x)
    assert isinstance(h, Tensor)
    assert torch.equal(h, operator.run(x)["h"])


@pytest.mark.parametrize("dims", MAIN, ids="{0[0]}_{0[1]}".format)
def test_every_repeat_is_bitwise_equal(
    operator: Any, dtype: torch.dtype, dims: tuple[int, int], make_inputs: Make, assert_accurate: Check
) -> None:
    x = make_inputs(2, 40, 450, dims, dtype, operator.states)
    truth = operator.truth(x)
    runs = [operator.run, operator.run_sequential] if dims in ((128, 256), (256, 512)) else [operator.run]
    for run in runs:
        first = run(x)
        assert_accurate(first, truth)
        for _ in range(20):
            again = run(x)
            assert all(torch.equal(again[name], first[name]) for name in first), run.__name__


@pytest.mark.slow
@pytest.mark.parametrize("dims", NATIVE, ids="{0[0]}_{0[1]}".format)
def test_at_benchmark_size(
    operator: Any, dtype: torch.dtype, dims: tuple[int, int], make_inputs: Make, assert_accurate: Check
) -> None:
    x = make_inputs(8, 16, 8192, dims, dtype)
    found = operator.run(x)
    # a row at a time: the fp64 copies of all would be four times the operands
    for row in range(8):
        truth = operator.truth({name: t[row, None] for name, t in x.items()})
        assert_accurate({name: t[row, None] for name, t in found.items()}, truth)
