from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk import doctor, reference
from tfla_tk.bench import ablation, compare, intra, readme, report, results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.shapes import Shape
from tfla_tk.core import layout
from tfla_tk.core.errors import UnsupportedError

SCHEDULES = ["sequential", "overlapped", "pingpong", "three_stage"]
SMALL = (Shape(2, 96, 2, 16, 32), Shape(1, 64, 2, 32, 16))
REPORT = {
    "gpus": [],
    "torch_sees_gpu": False,
    "nvcc": {},
    "thunderkittens": {},
    "libraries": dict.fromkeys(("triton", "mlstm_kernels", "fla-core"), "1.0"),
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "report", lambda: REPORT)
    monkeypatch.setattr(ablation, "SHAPES", SMALL)


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_run_arguments(parser)
    return parser.parse_args(given)


def test_every_schedule_is_checked_timed_and_written(monkeypatch, tmp_path: Path, capsys) -> None:
    called: set[str] = set()

    def kernel(q, k, v, i, f, schedule: str) -> torch.Tensor:
        called.add(schedule)
        return reference.mlstm_parallel(q, k, v, i, f)

    monkeypatch.setattr(intra, "mlstm_intra", kernel)
    path = tmp_path / "rows.json"
    args = options("--json", str(path), "--commit", "abc")
    assert compare.carry_out(args, ablation.contests(), on_gpu=False) == 0
    assert called == set(SCHEDULES)
    rows = results.load(path)
    assert [(row["shape"]["T"], row["schedule"]) for row in rows] == [
        (t, s) for t in (96, 64) for s in SCHEDULES
    ]
    assert {(row["op"], row["pass"], row["backend"], row["commit"]) for row in rows} == {
        ("mlstm_intra", "fwd", "tk", "abc")
    }
    assert len({row["run"] for row in rows}) == 1 and max(row["rel_err"]["h"] for row in rows) < 1e-5
    # 3 tiles of 64 x 64 for each of 4 heads
    flops = 4 * 3 * 2 * 64 * 64 * (16 + 32)
    assert rows[0]["tflops"] == pytest.approx(flops / rows[0]["ms"] / 1e9, rel=1e-3)
    assert "mLSTM, intra-chunk part, forward, B2 T96 H2 16/32" in capsys.readouterr().out


def test_what_the_kernel_refuses_is_skipped_with_the_reason(monkeypatch, tmp_path: Path, capsys) -> None:
    def kernel(q, k, v, i, f, schedule: str) -> torch.Tensor:
        if q.shape[-1] == 32:
            raise ValueError("head dims: expected at most 16/32")
        if schedule == "three_stage":
            raise UnsupportedError("mlstm_intra", "no room for a third stage")
        return reference.mlstm_parallel(q, k, v, i, f)

    monkeypatch.setattr(intra, "mlstm_intra", kernel)
    path = tmp_path / "rows.json"
    assert compare.carry_out(options("--json", str(path)), ablation.contests(), on_gpu=False) == 0
    assert [row["schedule"] for row in results.load(path)] == SCHEDULES[:3]
    out = capsys.readouterr().out
    assert "tk:three_stage: unsupported: no room for a third stage" in out
    assert "tk:overlapped: unsupported: head dims: expected at most 16/32" in out


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_wrong_kernel_is_the_exit_status(monkeypatch, tmp_path: Path, fault: str) -> None:
    def kernel(q, k, v, i, f, schedule: str) -> torch.Tensor:
        if schedule == "pingpong" and fault == "raises":
            raise RuntimeError("the launch was refused")
        return reference.mlstm_parallel(q, k, v, i, f) * (1.1 if schedule == "pingpong" else 1.0)

    monkeypatch.setattr(intra, "mlstm_intra", kernel)
    path = tmp_path / "rows.json"
    args = options("--json", str(path))
    assert compare.carry_out(args, ablation.contests()[:1], on_gpu=False) == 1
    assert [row["schedule"] for row in results.load(path)] == ["sequential", "overlapped", "three_stage"]


def test_command_without_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(intra, "mlstm_intra", reference.mlstm_parallel)
    assert main(["ablation"]) == 1
    assert "ablation: expected a CUDA GPU, found none" in capsys.readouterr().err


def test_command_runs_every_contest_with_its_options(monkeypatch) -> None:
    monkeypatch.setattr(intra, "mlstm_intra", reference.mlstm_parallel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[tuple[list[Shape], str | None, bool]] = []

    def note(args: argparse.Namespace, contests: list[compare.Contest], *, on_gpu: bool) -> int:
        seen.append(([contest.shape for contest in contests], args.commit, on_gpu))
        return 1

    monkeypatch.setattr(ablation, "carry_out", note)
    assert main(["ablation", "--commit", "abc"]) == 1
    assert main(["ablation", "--quick"]) == 1
    assert seen == [(list(SMALL), "abc", True), (list(SMALL[:1]), None, True)]


@pytest.mark.parametrize("op", list(ablation.PUBLIC))
def test_both_schedules_of_the_public_functions_in_both_passes(monkeypatch, tmp_path: Path, op: str) -> None:
    called: set[str] = set()
    name = ablation.OPERATORS[op].function
    right = getattr(tfla_tk, name)

    def function(*tensors: torch.Tensor, backend: str, **options: Any) -> Any:
        called.add(backend)
        return right(*tensors, backend="reference", **options)

    monkeypatch.setattr(tfla_tk, name, function)
    monkeypatch.setitem(ablation.PUBLIC, op, SMALL)
    path = tmp_path / "rows.json"
    assert compare.carry_out(options("--json", str(path)), ablation.contests(op), on_gpu=False) == 0
    assert called == {"tk:sequential", "tk:overlapped"}
    rows = results.load(path)
    assert [(row["pass"], row["shape"]["T"], row["schedule"]) for row in rows] == [
        (which, t, s) for which in ("fwd", "fwdbwd") for t in (96, 64) for s in SCHEDULES[:2]
    ]
    assert {(row["op"], row["backend"]) for row in rows} == {(op, "tk")}
    text = readme.render([{**row, "gpu": "NVIDIA H200"} for row in rows])
    assert f"### {report.TITLES[op]}, schedules" in text
    assert "| B2 T96 H2 16/32 | forward + backward |" in text


def test_the_schedules_are_backends_of_the_public_functions() -> None:
    for op in ablation.PUBLIC:
        names = {contest.variants[n].call for contest in ablation.contests(op) for n in range(2)}
        assert {name.partition(":")[2] for name in names} <= set(layout.SCHEDULES)
        for contest in ablation.contests(op):
            contest.operator.check_shape(contest.shape)


def test_command_takes_the_operators(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[list[tuple[str, str]]] = []

    def note(args: argparse.Namespace, contests: list[compare.Contest], *, on_gpu: bool) -> int:
        seen.append([(contest.operator.name, contest.which) for contest in contests])
        return 0

    monkeypatch.setattr(ablation, "carry_out", note)
    assert main(["ablation", "--op", "gla,gated_delta_rule"]) == 0
    assert {op for op, _ in seen[0]} == {"gla", "gated_delta_rule"}
    assert {which for _, which in seen[0]} == {"fwd", "fwdbwd"}
    with pytest.raises(SystemExit):
        main(["ablation", "--op", "retention"])
