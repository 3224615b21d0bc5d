"""What the host does for packed sequences that have new lengths in every call; no GPU is touched."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import build
from tfla_tk.core.memo import LIMIT

from .calls import MODULES, OPS, Op, forget_calls, take_tensors_for_a_gpus
from .stand_in import pretend_a_gpu

HEADS, DIM = 2, 64
FAMILIES = ("exp", "decay", "gla", "delta", "kda")
EVERY = pytest.mark.parametrize("op", [OPS[name] for name in FAMILIES], ids=str)


class Launcher:
    """Stands for all launchers: its launches do nothing."""

    def __getattr__(self, name: str) -> Any:
        sizes = {"bytes": 4096, "parts": 1, "offsets": (0, 1024), "multiprocessor": 1}
        prepared = (4096,) * 3 if name == "tiles_bytes" else sizes.get(name.rpartition("_")[2])
        return lambda *arguments: prepared


@pytest.fixture(autouse=True)
def passes_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launcher = Launcher()
    monkeypatch.setattr(build, "load", lambda *wanted: launcher)
    monkeypatch.setattr(build, "launches", lambda prepared: lambda starts, stream: None)
    take_tensors_for_a_gpus(monkeypatch)
    pretend_a_gpu(monkeypatch, *MODULES)
    yield
    forget_calls()


def packed(op: Op, tokens: int, sequences: int, *, trains: bool = False) -> tuple[list[torch.Tensor], Any]:
    """q, k, v and gates of a call of so many tokens, and the offsets of its sequences."""

    def empty(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (1, HEADS, tokens) if op.is_mlstm else (1, tokens, HEADS)
        return torch.empty(*shape, *dims, dtype=dtype, requires_grad=trains)

    x = [empty(DIM, dtype=torch.bfloat16) for _ in range(3)]
    x += [empty(*op.channels(name, DIM)) for name in op.gates]
    return x, torch.arange(sequences + 1) * tokens // sequences


def run(op: Op, x: list[torch.Tensor], offsets: torch.Tensor) -> None:
    """Forward and, where a gradient is recorded, backward."""
    out = getattr(tfla_tk, op.name)(*x, cu_seqlens=offsets, backend="tk")
    o = out[0] if isinstance(out, tuple) else out
    if o.requires_grad:
        torch.autograd.grad(o, list(dict.fromkeys(x)), o)


def functions_called_by(op: Op, *arguments: Any) -> int:
    """Functions in Python that run for a call: its time, but for how busy the machine is."""
    count = 0

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        run(op, *arguments)
    finally:
        sys.setprofile(None)
    return count


@EVERY
def test_a_call_of_new_lengths_is_planned_in_few_steps(op: Op) -> None:
    """Twice as many take more than the 200 us that new lengths may add."""
    run(op, *packed(op, 500, 3, trains=True))
    drawn = [packed(op, 1000 + tokens, 2 + tokens % 7, trains=True) for tokens in range(50)]
    most = max(functions_called_by(op, *x) for x in drawn)
    assert most < (1000 if op.name == "chunk_gated_delta_rule" else 750)


@EVERY
def test_lengths_that_the_memo_has_forgotten_push_out_one_another_alone(op: Op) -> None:
    for tokens in range(LIMIT + 10):
        run(op, *packed(op, 1000 + tokens, 2))
    assert len(op.path.plans) == LIMIT
    latest = packed(op, 1000 + LIMIT + 9, 2)
    assert functions_called_by(op, *latest) < 60
    # of the lengths before them all but the oldest are known
    assert functions_called_by(op, *packed(op, 1000 + 10, 2)) < 100
