"""The host's time for packed sequences that have new lengths in every call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk

HEADS, DIM, CALLS = 4, 128, 1000
LONGEST_US = 200.0  # the median of a forward, and of a backward


def draw(op: str, tokens: int) -> list[Tensor]:
    def normal(*dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (1, HEADS, tokens) if op.startswith("mlstm") else (1, tokens, HEADS)
        return torch.randn(*shape, *dims, device="cuda").to(dtype).requires_grad_()

    x = [normal(DIM, dtype=torch.bfloat16) for _ in range(3)]
    x += (
        [normal(DIM)]
        if op == "chunk_gla"
        else [normal() for _ in range(1 if op == "chunk_simple_gla" else 2)]
    )
    return x


@pytest.mark.usefixtures("new_calls")
@pytest.mark.parametrize(
    "op",
    ["mlstm_chunkwise", "mlstm_siging_chunkwise", "chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule"],
)
def test_a_call_of_new_lengths_is_planned_soon(op: str, record_property: Callable[[str, Any], None]) -> None:
    """Run it alone: other processes take the host's time."""
    function = getattr(tfla_tk, op)
    longest = draw(op, 2048 + CALLS)
    of_forward, of_backward = [], []
    for call in range(-20, CALLS):
        tokens, sequences = 2048 + call, 2 + call % 31
        narrow = 2 if op.startswith("mlstm") else 1
        x = [t.detach().narrow(narrow, 0, tokens).contiguous().requires_grad_() for t in longest]
        offsets = (torch.arange(sequences + 1, device="cuda") * tokens) // sequences
        torch.cuda.synchronize()  # the queue of launches is never full
        start = time.perf_counter()
        out = function(*x, cu_seqlens=offsets, backend="tk")
        middle = time.perf_counter()
        o = out[0] if isinstance(out, tuple) else out
        do = torch.empty_like(o)
        torch.cuda.synchronize()
        before = time.perf_counter()
        torch.autograd.grad(o, x, do)
        end = time.perf_counter()
        if call >= 0:  # those before compile, and load libraries
            of_forward.append(middle - start)
            of_backward.append(end - before)
    found = {
        name: 1e6 * statistics.median(times)
        for name, times in (("forward", of_forward), ("backward", of_backward))
    }
    for name, microseconds in found.items():
        record_property(f"{op} {name}", f"{microseconds:.0f} us")
    assert all(microseconds < LONGEST_US for microseconds in found.values()), found
