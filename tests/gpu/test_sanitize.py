"""Small launches of every kind of tile for compute-sanitizer (``make sanitize``).

Inputs are drawn and judged on the CPU: the sanitizer sees little more than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Make = Callable[..., dict[str, Tensor]]
Check = Callable[..., None]

# one instance with one state warpgroup, one with two, one whose heads take several slices of V, and the one
# state warpgroup of that kernel
TILES = [(64, 64), (128, 256), (256, 512), (256, 64)]
SEQ = 450  # eight chunks, the last one short: every place of every ring is used twice at least

pytestmark = pytest.mark.sanitize


def to_gpu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cuda() for name, t in x.items()}


def to_cpu(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cpu() for name, t in x.items()}


@pytest.mark.parametrize("dims", TILES, ids="{0[0]}_{0[1]}".format)
def test_tiles(operator: Any, dims: tuple[int, int], make_inputs: Make, assert_accurate: Check) -> None:
    """From an initial state."""
    x = make_inputs(1, 2, SEQ, dims, states=operator.states, device="cpu")
    assert_accurate(to_cpu(operator.run(to_gpu(x))), operator.truth(x))


@pytest.mark.parametrize("dims", [(128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
def test_the_sequential_kernels(
    dims: tuple[int, int], exponential: Any, make_inputs: Make, assert_accurate: Check
) -> None:
    x = make_inputs(1, 2, SEQ, dims, device="cpu")
    assert_accurate(to_cpu(exponential.run_sequential(to_gpu(x))), exponential.truth(x))


def test_half(operator: Any, make_inputs: Make, assert_accurate: Check) -> None:
    """fp16 at K = 256, whose values the sigmoid gate scales otherwise; rows are held larger for a while."""
    x = make_inputs(1, 2, SEQ, (256, 512), torch.float16, operator.states, device="cpu")
    x["i"][..., 100:230] -= 12.0
    x["f"][..., 100:230] = -10.0
    assert_accurate(to_cpu(operator.run(to_gpu(x))), operator.truth(x))


@pytest.mark.parametrize("seq", [1, 65])
def test_padding(seq: int, exponential: Any, make_inputs: Make, assert_accurate: Check) -> None:
    """Head dims that fill no tile, in [B, S, NH, D] memory, with nothing behind the last row."""
    x = make_inputs(1, 2, seq, (48, 80), torch.float16, exponential.states, device="cpu")
    on_gpu = to_gpu(x)
    for name in ("q", "k", "v"):
        on_gpu[name] = on_gpu[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_accurate(to_cpu(exponential.run(on_gpu)), exponential.truth(x))
