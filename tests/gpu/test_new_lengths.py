"""The host's time for packed sequences that have new lengths in every call."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk

HEADS, DIM, CALLS = 4, 128, 1000
LONGEST_US = 200.0  # that new lengths add to the median of a forward, and of a backward
# of a CPU whose other cores run tests nothing can be said
pytestmark = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="measured without other tests beside it"
)


def draw(op: str, tokens: int) -> list[Tensor]:
    def normal(*dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (1, HEADS, tokens) if op.startswith("mlstm") else (1, tokens, HEADS)
        return torch.randn(*shape, *dims, device="cuda").to(dtype).requires_grad_()

    x = [normal(DIM, dtype=torch.bfloat16) for _ in range(3)]
    x.append(normal(*[DIM] * (op in ("chunk_gla", "chunk_kda"))))
    return x if op in ("chunk_gla", "chunk_simple_gla") else [*x, normal()]


def times_of_calls(op: str, lengths: Iterator[tuple[int, int]]) -> dict[str, float]:
    """Median microseconds of a forward and of a backward.

    Args:
        lengths: tokens and sequences of each call.
    """
    narrow = 2 if op.startswith("mlstm") else 1
    longest = draw(op, 2048 + CALLS)
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for tokens, sequences in lengths:
        x = [t.detach().narrow(narrow, 0, tokens).contiguous().requires_grad_() for t in longest]
        offsets = (torch.arange(sequences + 1, device="cuda") * tokens) // sequences
        torch.cuda.synchronize()  # the queue of launches is never full
        start = time.perf_counter()
        out = getattr(tfla_tk, op)(*x, cu_seqlens=offsets, backend="tk")
        times["forward"].append(time.perf_counter() - start)
        o = out[0] if isinstance(out, tuple) else out
        do = torch.empty_like(o)
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(o, x, do)
        times["backward"].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


@pytest.mark.xfail(
    raises=AssertionError,
    reason="285 to 513 us on an H200's host: Python prepares the launches of every new length",
)
@pytest.mark.usefixtures("new_calls")
@pytest.mark.parametrize(
    "op",
    [
        *("mlstm_chunkwise", "mlstm_siging_chunkwise", "chunk_simple_gla"),
        *("chunk_gla", "chunk_gated_delta_rule", "chunk_kda"),
    ],
)
def test_a_call_of_new_lengths_is_planned_soon(op: str, record_property: Callable[[str, Any], None]) -> None:
    known = times_of_calls(op, ((2048, 5) for _ in range(200)))
    new = times_of_calls(op, ((2048 + call, 2 + call % 31) for call in range(CALLS)))
    added = {name: new[name] - known[name] for name in known}
    for name in known:
        record_property(f"{op} {name}", f"{known[name]:.0f} us, new lengths {new[name]:.0f} us")
    assert all(microseconds < LONGEST_US for microseconds in added.values()), (known, new)
