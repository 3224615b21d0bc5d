from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from tfla_tk import doctor, reference
from tfla_tk.backends.tk.scalar_gate import forward
from tfla_tk.bench import ablation, compare, results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.shapes import MAIN, Shape
from tfla_tk.build import all_instances, instances

SMALL = (Shape(2, 96, 2, 16, 32), Shape(1, 64, 2, 32, 16))
REPORT = {
    "gpus": [],
    "torch_sees_gpu": False,
    "nvcc": {},
    "thunderkittens": {},
    "prebuilt": {"kernels": 0},
    "libraries": dict.fromkeys(("triton", "mlstm_kernels", "fla-core"), "1.0"),
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "report", lambda: REPORT)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[forward.Options]:
    """The reference in the place of the kernels, at small shapes: the options of every launch."""
    seen: list[forward.Options] = []

    def run(tensors: tuple[Any, ...], options: forward.Options) -> tuple[Any, ...]:
        q, k, v, i, f, *others = tensors
        assert others == [None] * 4
        seen.append(options)
        if not options.sigmoid_gate:
            return (reference.mlstm_chunkwise(q, k, v, i, f, eps=options.eps),)
        normalize = options.normalize
        return (reference.mlstm_siging_chunkwise(q, k, v, i, f, normalize=normalize, eps=options.eps),)

    monkeypatch.setattr(forward, "run", run)
    monkeypatch.setattr(ablation, "MAIN", SMALL)
    return seen


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_run_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.slow
def test_both_kernels_are_checked_timed_and_written(launched, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    args = options("--json", str(path), "--commit", "abc")
    assert compare.carry_out(args, ablation.contests(), on_gpu=False) == 0
    rows = results.load(path)
    assert [(row["op"], row["shape"]["T"], row["schedule"]) for row in rows] == [
        (op, t, s)
        for op in ("mlstm_exp", "mlstm_sig")
        for t in (96, 64)
        for s in ("sequential", "overlapped")
    ]
    assert {(row["pass"], row["backend"], row["commit"]) for row in rows} == {("fwd", "tk", "abc")}
    assert len({row["run"] for row in rows}) == 1 and max(row["rel_err"]["h"] for row in rows) < 1e-5
    assert {(x.sigmoid_gate, x.normalize, x.sequential) for x in launched} == {
        (gate, not gate, sequential) for gate in (False, True) for sequential in (False, True)
    }
    assert "mLSTM, exponential input gate, forward, B2 T96 H2 16/32" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_wrong_kernel_is_the_exit_status(monkeypatch, launched, tmp_path: Path, fault: str) -> None:
    right = forward.run

    def run(tensors: tuple[Any, ...], options: forward.Options) -> tuple[Any, ...]:
        if options.sequential and fault == "raises":
            raise RuntimeError("the launch was refused")
        return (right(tensors, options)[0] * (1.1 if options.sequential else 1.0),)

    monkeypatch.setattr(forward, "run", run)
    path = tmp_path / "rows.json"
    assert compare.carry_out(options("--json", str(path)), ablation.contests()[:1], on_gpu=False) == 1
    assert [row["schedule"] for row in results.load(path)] == ["overlapped"]


def test_the_sequential_kernels_are_built_ahead() -> None:
    """`tfla-tk build --all` compiles what every shape takes."""
    known = all_instances()
    for shape in MAIN:
        for sequential in (False, True):
            tile = instances.mlstm_tile(shape.K, shape.V)
            assert instances.mlstm_fwd(tile, half=False, sequential=sequential) in known


def test_command_without_a_gpu(capsys) -> None:
    assert main(["ablation"]) == 1
    assert "ablation: expected a CUDA GPU, found none" in capsys.readouterr().err


def test_command_runs_every_contest_with_its_options(monkeypatch, launched) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[tuple[list[Shape], str | None, bool]] = []

    def note(args: argparse.Namespace, contests: list[compare.Contest], *, on_gpu: bool) -> int:
        seen.append(([contest.shape for contest in contests], args.commit, on_gpu))
        return 1

    monkeypatch.setattr(ablation, "carry_out", note)
    assert main(["ablation", "--commit", "abc"]) == 1
    assert main(["ablation", "--quick"]) == 1
    assert seen == [([*SMALL, *SMALL], "abc", True), ([SMALL[0]], None, True)]
