"""Engines' calls of the gated delta rule on the decoding kernels, in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError
from tfla_tk.bench.timing import capture

from ..cpu.api.test_serving import draw, exact, ints, packed_decode, update
from .accuracy import DEVICE, relative_error

DIMS = (128, 128)
LIMIT = 5e-3  # of outputs in bf16


def on_gpu(**options: Any) -> dict[str, Tensor]:
    """q, k, v, a and b in bf16, the pool and the parameters in fp32."""
    x = {name: t.to(DEVICE) for name, t in draw(dtype=torch.float32, dims=DIMS, **options).items()}
    return x | {name: x[name].bfloat16() for name in "qkvab"}


def assert_token(x: dict[str, Tensor], row: int, t: int, before: Tensor, o: Tensor, after: Tensor) -> None:
    expected, state = exact(x, row, slice(t, t + 1), before)
    assert relative_error(o, expected[0]) <= LIMIT
    torch.testing.assert_close(after.double(), state, rtol=1e-5, atol=1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize(("first_index", "indices"), [(0, [3, -1, 0, 8]), (1, [3, 0, 1, 8])])
def test_a_packed_decode(first_index: int, indices: list[int]) -> None:
    x = on_gpu(batch=4, seq=1)
    before = x["initial_state"].clone()
    o, pool = packed_decode(x, ints(indices).to(DEVICE), first_index=first_index)
    for row, slot in enumerate(indices):
        if slot < first_index:
            assert not o[row].any()
        else:
            assert_token(x, row, 0, before[slot], o[row, 0], pool[slot])
    others = sorted(set(range(9)) - set(indices))
    assert torch.equal(pool[others], before[others])


def test_drafts_in_a_graph() -> None:
    """Replayed with other accepted counts: one launch, bitwise the tokens one by one."""
    table = ints([[3, 4, 5, 1], [-1, -1, -1, -1], [8, 7, 6, 2]]).to(DEVICE)
    x, accepted = on_gpu(batch=3, seq=4), ints([1, 1, 1]).to(DEVICE)
    pool = x["initial_state"]
    before = pool.clone()
    captured: list[Tensor] = []

    def step() -> None:
        captured[:] = [update(x, table, num_accepted_tokens=accepted)[0]]

    graph = capture(step, torch.device(DEVICE))
    assert graph is not None and graph.launches in (1, None)  # nothing is copied
    for counts in ([2, 1, 1], [4, 3, 2]):
        accepted.copy_(ints(counts))
        pool.copy_(before)
        graph.replay()
        (o,) = captured
        assert not o[1].any()
        for row in (0, 2):
            state = before[table[row, counts[row] - 1]].clone()
            for t in range(4):
                token = {n: s[row : row + 1, t : t + 1] if n in "qkvab" else s for n, s in x.items()}
                alone, own = update(token | {"initial_state": state[None].clone()}, ints([0]).to(DEVICE))
                assert torch.equal(o[row, t], alone[0, 0]) and torch.equal(pool[table[row, t]], own[0])
                assert_token(x, row, t, state, o[row, t], own[0])
                state = own[0]


def test_what_no_kernel_takes() -> None:
    """Before anything is written."""
    x = {name: t.to(DEVICE, torch.float32) for name, t in draw(batch=1, seq=1, dims=(16, 32)).items()}
    before = x["initial_state"].clone()
    with pytest.raises(UnsupportedError, match="K is one of 64, 96, 128, 256, this is 16"):
        packed_decode(x, ints([2]).to(DEVICE))
    assert torch.equal(x["initial_state"], before)
