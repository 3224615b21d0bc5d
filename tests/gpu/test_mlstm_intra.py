"""The intra-chunk kernel on the GPU against the fp64 reference: every schedule, tile and length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tfla_tk.bench.intra import SCHEDULES, TILES, mlstm_intra
from tfla_tk.reference import mlstm_parallel

Make = Callable[..., dict[str, Tensor]]
Error = Callable[[Tensor, Tensor], float]

TOLERANCE = 5e-3
REPEATS = 50
DIMS = [*TILES, (128, 512), (256, 512), (48, 80)]


def truth(inputs: dict[str, Tensor]) -> Tensor:
    h = mlstm_parallel(**{name: x.double() for name, x in inputs.items()})
    assert isinstance(h, Tensor)
    return h


@pytest.mark.parametrize("dims", DIMS, ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("seq", [1, 64, 65, 200, 1000, 2048])
def test_every_schedule(seq: int, dims: tuple[int, int], make_inputs: Make, rel_err: Error) -> None:
    x = make_inputs(2, 3, seq, dims)
    expected = truth(x)
    errors = {schedule: rel_err(mlstm_intra(**x, schedule=schedule), expected) for schedule in SCHEDULES}
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("dims", [(64, 64), (128, 256), (256, 512)], ids="{0[0]}_{0[1]}".format)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bitwise_repeatable(schedule: str, dims: tuple[int, int], make_inputs: Make, rel_err: Error) -> None:
    x = make_inputs(2, 16, 1000, dims)
    first = mlstm_intra(**x, schedule=schedule)
    assert rel_err(first, truth(x)) <= TOLERANCE
    for _ in range(REPEATS):
        assert torch.equal(mlstm_intra(**x, schedule=schedule), first)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_gates(scale: float, make_inputs: Make, rel_err: Error) -> None:
    """Sums of gates over the chunk that fp32 alone would not resolve."""
    x = make_inputs(1, 4, 1000)
    x = x | {"i": x["i"] * scale, "f": x["f"] * scale}
    expected = truth(x)
    for schedule in SCHEDULES:
        assert rel_err(mlstm_intra(**x, schedule=schedule), expected) <= TOLERANCE, schedule
