"""`tfla-tk compare` through its options, its exit status and the files that it writes."""

from __future__ import annotations

import csv
import itertools
import subprocess
from pathlib import Path

import pytest
import torch

from tfla_tk.bench import accuracy, compare, environment, results
from tfla_tk.bench.shapes import parse_shapes
from tfla_tk.build import BuildError
from tfla_tk.cli import main

from .conftest import FORMS, GATES, crash, exact, refuse

EXP = ("compare", "--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--quick")


@pytest.mark.slow
def test_forms_of_the_reference_of_every_operator(command, tmp_path: Path) -> None:
    options = ("--shapes", "1x48x2x16x32", "--pass", "all", "--quick", "--csv", str(tmp_path / "rows.csv"))
    status, rows, out, _ = command("compare", *options)
    assert status == 0
    results.load(tmp_path / "written.json")  # which are valid rows
    assert [row["op"] for row in rows] == [op for op in GATES for _ in range(6)]
    assert [row["backend"] for row in rows] == FORMS * 2 * len(GATES)
    assert len({row["run"] for row in rows}) == 1
    assert all(row["dtype"] == "fp32" and row["gpu"] is None and row["roofline"] is None for row in rows)
    for row in rows:
        output = "h" if row["op"].startswith("mlstm") else "o"
        gradients = ["dq", "dk", "dv", *GATES[row["op"]]] * (row["pass"] == "fwdbwd")
        assert list(row["rel_err"]) == [output, *gradients] and max(row["rel_err"].values()) < 1e-4
    with (tmp_path / "rows.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["op"], float(row["ms"])) for row in written] == [(row["op"], row["ms"]) for row in rows]
    assert "mLSTM, sigmoid input gate, forward + backward, B1 T48 H2 16/32" in out
    assert "Lightning attention, forward, B1 T48 H2 16/32" in out and "tfla-tk doctor" in out


@pytest.mark.parametrize("op", ["mlstm_exp", "simple_gla", "gated_delta_rule", "kda"])
def test_packed_sequences_and_more_value_heads(command, op: str) -> None:
    value_heads = {"HV": 4} if op != "mlstm_exp" else {}
    shape = "1x60x2x16x32xN7" + "xHV4" * bool(value_heads)
    status, rows, _, _ = command("compare", "--op", op, "--shapes", shape, "--pass", "fwd,fwdbwd")
    assert status == 0 and len(rows) == 6 and all("note" not in row for row in rows)
    assert rows[0]["shape"] == {"B": 1, "T": 60, "H": 2, "K": 16, "V": 32, "N": 7, **value_heads}


def test_inputs_reach_every_backend_and_are_told(break_backends, command) -> None:
    means: list[float] = []

    def spy(backend, tensors):
        assert all(
            tensors[x].transpose(1, 2).is_contiguous() and not tensors[x].is_contiguous() for x in "qkv"
        )
        means.append(tensors["f"].mean().item())
        return exact(backend, tensors)

    break_backends(spy)
    options = ("--op", "mlstm_exp", "--shapes", "1x64x4x16x16", "--quick")
    status, rows, out, _ = command("compare", *options, "--layout", "bsnd", "--forget-bias", "-1.5")
    assert status == 0 and len(means) > 3 and all(abs(mean + 1.5) < 0.5 for mean in means)
    assert {(row["layout"], row["forget_bias"]) for row in rows} == {("bsnd", -1.5)}
    assert "fp32, layout bsnd, forget bias -1.5; run" in out
    break_backends(exact)
    status, rows, out, _ = command(*EXP, "--backends", "reference:chunkwise")
    assert not {"layout", "forget_bias"} & rows[0].keys() and "fp32; run" in out


def test_packed_sequences_are_checked_each_for_itself(break_backends, command) -> None:
    """The backends get the offsets; one that takes all sequences for one is wrong from the second on."""
    given: list[list[int]] = []

    def spy(backend, tensors):
        given.append(tensors["cu_seqlens"].tolist())
        dropped = {"cu_seqlens"} if backend == "reference:parallel" else {}
        return exact(backend, {name: x for name, x in tensors.items() if name not in dropped})

    break_backends(spy)
    status, rows, out, _ = command(*EXP[:3], "--shapes", "1x64x1x16x16xN5", "--quick")
    lengths = parse_shapes("1x64x1x16x16xN5")[0].lengths()
    assert given[0] == [0, *itertools.accumulate(lengths)] and all(x == given[0] for x in given)
    assert status == 1 and "reference:parallel: FAILED: error against fp64" in out
    assert [row["backend"] for row in rows] == ["reference:recurrent", "reference:chunkwise"]


def test_shapes_that_an_operator_does_not_have_are_left_out_and_told(command) -> None:
    shapes = ("--shapes", "1x16x2x16x16,1x16x2x16x16xHV4", "--backends", "reference:chunkwise")
    _, rows, out, _ = command("compare", "--op", "simple_gla,retention", *shapes)
    found = [(row["op"], row["shape"].get("HV")) for row in rows]
    assert found == [("simple_gla", None), ("simple_gla", 4), ("retention", None)]
    told = "B1 T16 H2 HV4 16/16 left out: shape HV: expected 2, retention has no more value heads, got 4"
    assert told in out


@pytest.mark.parametrize("on_record", [False, True])
def test_a_run_that_is_cut_off_leaves_the_rows_that_it_has(monkeypatch, tmp_path: Path, on_record) -> None:
    path, run_contest = tmp_path / "rows.json", compare.run_contest

    def cut_off(*arguments):
        if path.exists():
            raise KeyboardInterrupt
        return run_contest(*arguments)

    monkeypatch.setattr(compare, "run_contest", cut_off)
    monkeypatch.setattr(environment, "record_path", lambda args: path if on_record else None)
    options = ["--op", "mlstm_sig", "--shapes", "1x32x1x16x16,1x48x1x16x16", "--backends", "reference"]
    written = [] if on_record else ["--json", str(path)]
    assert main(["compare", *options, *written]) == 130
    assert {row["shape"]["T"] for row in results.load(path)} == {32}


def test_a_contest_without_a_truth_fails_and_the_others_go_on(monkeypatch, command) -> None:
    compute_truth = accuracy.compute_truth

    def refuse(operator, shape, *rest, **options):
        if shape.T == 32:
            raise MemoryError("no room")
        return compute_truth(operator, shape, *rest, **options)

    monkeypatch.setattr(accuracy, "compute_truth", refuse)
    shapes = ("--shapes", "1x32x1x16x16,1x48x1x16x16", "--backends", "reference:chunkwise")
    status, rows, out, _ = command("compare", *EXP[1:3], *shapes)
    assert status == 1 and [row["shape"]["T"] for row in rows] == [48]
    assert "reference:chunkwise: FAILED: inputs or fp64 reference: MemoryError: no room" in out


def wrong(backend, tensors):
    h, state = exact(backend, tensors)
    return 2 * h, state


def not_built(backend, tensors):
    raise BuildError("toy: the compiler fails\ntoy.cu(1): error: what is this", "do that")


def serve_one(backend, tensors):
    return (exact if backend == "triton:xl_chunk_128" else refuse)(backend, tensors)


@pytest.mark.parametrize(
    ("backend", "backends", "status", "told"),
    [
        (exact, "tk", 0, ""),
        (wrong, "tk", 1, "tk: FAILED: error against fp64: h 1.0e+00 > 1.0e-04"),
        (wrong, "reference", 1, "reference:chunkwise: FAILED: error against fp64: h 1.0e+00 > 1.0e-04"),
        (crash, "tk", 1, "tk: FAILED: RuntimeError: illegal memory access\n"),
        (not_built, "tk", 1, "toy.cu(1): error: what is this (do that)"),
        # a baseline counts only where it was named
        (wrong, "triton", 0, "triton:xl_chunk_64: FAILED: error against fp64: h 1.0e+00 > 4.0e-03"),
        (wrong, "triton:xl_chunk_64", 1, "FAILED"),
        (crash, "triton", 0, "FAILED"),
        # what cannot serve counts where it was named, a family where none of its variants serves
        (refuse, "tk", 1, "tk: unsupported: the kernels have no backward yet"),
        (refuse, "triton:xl_chunk_64", 1, "unsupported"),
        (refuse, "triton", 1, "unsupported"),
        (serve_one, "triton", 0, "triton:xl_chunk_64: unsupported: the"),
    ],
)
def test_exit_status(break_backends, command, tmp_path: Path, backend, backends, status, told) -> None:
    break_backends(backend)
    plot = tmp_path / "rows.svg"
    ran = command(*EXP, "--backends", backends, "--plot", str(plot))
    assert ran.status == status and told in ran.out
    # what failed has no row, and nothing is drawn of nothing
    assert (ran.rows != []) == plot.exists() == (backend in (exact, serve_one))


def test_update_results_refuses_what_is_not_fit_for_the_record(monkeypatch, command) -> None:
    monkeypatch.setattr(environment, "git_commit", lambda root: None)
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    for on_gpu, options, message in (
        (False, (), "expected a CUDA GPU"),
        (True, ("--quick",), "--quick runs fewer than 30 times"),
        (True, ("--layout", "bsnd"), "this is no git checkout, name what is measured with --commit"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=on_gpu: found)
        ran = command("compare", *EXP[1:3], "--update-results", *options)
        assert ran.status == 2 and f"--update-results: {message}" in ran.err


def test_git_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert environment.git_commit(tmp_path) is None
    git("init", "-q")
    assert environment.git_commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    git("tag", "-a", "v1", "-m", "a tag")
    head = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "b").write_text("not tracked")
    assert environment.git_commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert environment.git_commit(tmp_path) == f"{head}-dirty"
