"""Head dims that are no multiple of 16: padded with zeros, in front of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule, chunk_gla, chunk_simple_gla

from . import delta_rule, test_gla, test_scalar_decay
from .linear import Tensors, assert_graph_replays, check_both, pack, run
from .memory import LENGTHS

DRAWS: dict[Any, Callable[..., Tensors]] = {
    chunk_simple_gla: test_scalar_decay.draw,
    chunk_delta_rule: delta_rule.draw,
    chunk_gated_delta_rule: delta_rule.draw,
    chunk_gla: test_gla.draw,
}
of_function = pytest.mark.parametrize("function", DRAWS, ids=lambda f: f.__name__)


def draw(function: Any, *args: Any, **options: Any) -> Tensors:
    x = DRAWS[function](*args, **options)
    return delta_rule.ungated(x) if function is chunk_delta_rule else x


@of_function
@pytest.mark.parametrize(
    "dims", [(60, 60), (100, 100), (72, 64), (64, 100), (250, 500), (24, 8)], ids="{0[0]}_{0[1]}".format
)
def test_any_head_dim(function: Any, dims: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(function, 2, 150, dims=dims, dtype=dtype)
    assert tfla_tk.which(function, **x).backend == "tk"
    check_both(x, function)


@of_function
def test_packed_sequences(function: Any) -> None:
    x = draw(function, 1, sum(LENGTHS), dims=(60, 100), sequences=len(LENGTHS))
    check_both(pack(x), function)


@of_function
def test_a_graph_replays_the_call(function: Any) -> None:
    x, other = (draw(function, 1, 150, dims=(60, 100), seed=seed) for seed in range(2))

    def call(x: Tensors) -> Tensors:
        return run(x, function=function)

    assert_graph_replays(call, x, other, [call(other), call(x)], 4)
