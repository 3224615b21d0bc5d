"""Results of the operators in [B, T, H, D]: contiguous, and bitwise equal, whatever the inputs' strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_delta_rule

from .linear import Tensors, assert_equal, pack, run, train
from .memory import LENGTHS
from .test_head_dims import draw, of_function


def heads_first(x: Tensors) -> Tensors:
    """The same numbers with tokens and heads swapped in memory, of the initial state K and V."""

    def turned(name: str, t: Tensor) -> Tensor:
        if t.dim() < 3:
            return t
        dims = (2, 3) if name == "initial_state" else (1, 2)
        return t.transpose(*dims).contiguous().transpose(*dims)

    return {name: turned(name, t) for name, t in x.items()}


@of_function
@pytest.mark.parametrize("dims", [(128, 128), (60, 100), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_results_are_contiguous(function: Any, dims: tuple[int, int], packed: bool, compiled: bool) -> None:
    sequences = {"sequences": len(LENGTHS)} if packed else {}
    x = draw(function, 1 if packed else 2, sum(LENGTHS) if packed else 150, dims=dims, **sequences)
    x = pack(x) if packed else x
    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    turned = heads_first(x)
    found = run(turned, function=called)
    assert all(t.is_contiguous() for t in found.values())
    assert_equal(found, run(x, function=called))
    assert_equal(train(turned, function=called), train(x, function=called))
    if function is not chunk_delta_rule:
        turned["initial_state"] = turned["initial_state"].mT
        last = run(turned, function=called, state_v_first=True)["final_state"]
        assert last.is_contiguous() and torch.equal(last.mT, found["final_state"])
    torch._dynamo.reset()
