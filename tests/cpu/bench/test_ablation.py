"""`python -m tfla_tk.bench ablation`, with the reference in the place of the kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tfla_tk import reference
from tfla_tk.backends.tk.scalar_gate import forward
from tfla_tk.bench import ablation, environment
from tfla_tk.bench.shapes import Shape

SMALL = (Shape(2, 96, 2, 16, 32), Shape(1, 64, 2, 32, 16))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[forward.Options]:
    """Options of every launch; the command takes the CPU for a GPU."""
    seen: list[forward.Options] = []

    def run(tensors: tuple[Any, ...], options: forward.Options) -> tuple[Any, ...]:
        q, k, v, i, f, *others = tensors
        assert others == [None] * 4
        seen.append(options)
        if options.sigmoid_gate:
            return (reference.mlstm_siging_chunkwise(q, k, v, i, f, normalize=options.normalize),)
        return (reference.mlstm_chunkwise(q, k, v, i, f, eps=options.eps),)

    monkeypatch.setattr(forward, "run", run)
    monkeypatch.setattr(ablation, "MAIN", SMALL)
    monkeypatch.setattr(ablation.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(environment, "fetch_thunderkittens", lambda: None)
    return seen


def test_both_kernels_are_checked_timed_and_written(launched, command) -> None:
    status, rows, out, _ = command("ablation", "--commit", "abc")
    assert status == 0
    expected = itertools.product(("mlstm_exp", "mlstm_sig"), (96, 64), ("sequential", "overlapped"))
    assert [(row["op"], row["shape"]["T"], row["schedule"]) for row in rows] == list(expected)
    assert {(row["pass"], row["backend"], row["commit"]) for row in rows} == {("fwd", "tk", "abc")}
    assert len({row["run"] for row in rows}) == 1 and max(row["rel_err"]["h"] for row in rows) < 1e-5
    assert {(x.sigmoid_gate, x.normalize, x.sequential) for x in launched} == {
        (gate, not gate, sequential) for gate in (False, True) for sequential in (False, True)
    }
    assert "mLSTM, exponential input gate, forward, B2 T96 H2 16/32" in out


def test_a_wrong_kernel_is_the_exit_status(monkeypatch, launched, command) -> None:
    right = forward.run
    for fault in ("wrong", "raises"):

        def run(tensors: tuple[Any, ...], options: forward.Options, fault: str = fault) -> tuple[Any, ...]:
            if options.sequential and fault == "raises":
                raise RuntimeError("the launch was refused")
            return (right(tensors, options)[0] * (1.1 if options.sequential else 1.0),)

        monkeypatch.setattr(forward, "run", run)
        status, rows, _, _ = command("ablation", "--quick")
        assert status == 1 and [(row["schedule"], row["shape"]["T"]) for row in rows] == [("overlapped", 96)]
