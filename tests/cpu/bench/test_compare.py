from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from pathlib import Path

import pytest

from tfla_tk import UnsupportedError, doctor, mlstm_chunkwise, reference
from tfla_tk.bench import accuracy, compare, environment, operators, results
from tfla_tk.bench.operators import OPERATORS
from tfla_tk.bench.shapes import parse_shapes
from tfla_tk.bench.timing import Plan
from tfla_tk.bench.usage import UsageError
from tfla_tk.bench.variants import find_variants
from tfla_tk.build import BuildError

REPORT = {
    "gpus": [],
    "torch_cuda": None,
    "torch_sees_gpu": False,
    "nvcc": {"error": "no usable nvcc:\n  PATH: nothing", "remedy": "set CUDA_HOME"},
    "thunderkittens": {"error": "not found", "remedy": "set THUNDERKITTENS_ROOT"},
    "prebuilt": {"kernels": 0},
    "libraries": {"triton": "3.7.1", "mlstm_kernels": None, "fla-core": None},
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "report", lambda: REPORT)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in ("CPU_PLAN", "CPU_QUICK"):
        monkeypatch.setattr(compare, plan, Plan(repeats=2, budget_ms=20))


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(options)


def run(*options: str) -> int:
    return compare.run(parse(*options))


def patch_backend(monkeypatch: pytest.MonkeyPatch, function) -> None:
    """Every backend of mLSTMexp computes this function."""
    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", lambda *tensors, backend: function(*tensors))


@pytest.mark.slow
def test_forms_of_the_reference_without_a_gpu(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    mlstm = ("--op", "mlstm_exp,mlstm_sig")
    options = (*mlstm, "--shapes", "1x48x2x16x32", "--pass", "all", "--quick", "--json", str(path))
    assert run(*options, "--csv", str(tmp_path / "rows.csv")) == 0
    rows = results.load(path)
    forms = [f"reference:{form}" for form in ("recurrent", "parallel", "chunkwise")]
    assert [row["backend"] for row in rows] == forms * 4
    assert [row["op"] for row in rows] == ["mlstm_exp"] * 6 + ["mlstm_sig"] * 6
    assert len({row["run"] for row in rows}) == 1
    assert max(row["rel_err"]["h"] for row in rows) < 1e-5
    assert all(row["dtype"] == "fp32" and row["gpu"] is None and row["roofline"] is None for row in rows)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(rows)
    out = capsys.readouterr().out
    assert "mLSTM, sigmoid input gate, forward + backward, B1 T48 H2 16/32" in out
    assert "no CUDA GPU (nvidia-smi is absent or reports no device)" in out
    assert "no nvcc, the kernels cannot be compiled: no usable nvcc; set CUDA_HOME" in out
    assert "no ThunderKittens" in out and "set THUNDERKITTENS_ROOT" in out
    assert "no Triton baselines (mlstm_kernels, fla-core missing): pip install 'tfla_tk[baselines]'" in out


@pytest.mark.slow
def test_inputs_other_than_the_default_ones_are_told_and_written(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    options = ("--op", "mlstm_exp", "--shapes", "1x48x2x16x32", "--quick", "--json", str(path))
    assert run(*options, "--layout", "bsnd", "--forget-bias", "-1.5") == 0
    assert {(row["layout"], row["forget_bias"]) for row in results.load(path)} == {("bsnd", -1.5)}
    assert "fp32, layout bsnd, forget bias -1.5; run" in capsys.readouterr().out
    assert run(*options) == 0
    assert not any({"layout", "forget_bias"} & row.keys() for row in results.load(path))
    assert "fp32; run" in capsys.readouterr().out


def test_layout_and_forget_bias_reach_every_backend(monkeypatch) -> None:
    means: list[float] = []

    def spy(*tensors):
        assert not any(x.is_contiguous() or not x.transpose(1, 2).is_contiguous() for x in tensors[:3])
        means.append(tensors[4].mean().item())
        return reference.mlstm_chunkwise(*tensors)

    patch_backend(monkeypatch, spy)
    options = ("--op", "mlstm_exp", "--shapes", "1x64x4x16x16", "--quick")
    assert run(*options, "--layout", "bsnd", "--forget-bias", "12") == 0
    assert len(means) > 3 and all(abs(mean - 12) < 0.5 for mean in means)


@pytest.mark.slow
def test_the_operators_of_fla(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    gates_of = {"simple_gla": ["dg"], "retention": [], "lightning": []}
    gates_of |= {"gla": ["dg"], "delta_rule": ["dbeta"], "gated_delta_rule": ["dg", "dbeta"]}
    options = ("--op", ",".join(gates_of), "--shapes", "1x48x2x16x32", "--pass", "all")
    assert run(*options, "--quick", "--json", str(path)) == 0
    rows = results.load(path)
    assert [row["op"] for row in rows] == [name for name in gates_of for _ in range(6)]
    for row in rows:
        gates = gates_of[row["op"]]
        assert list(row["rel_err"]) == ["o", *["dq", "dk", "dv", *gates] * (row["pass"] == "fwdbwd")]
    assert max(max(row["rel_err"].values()) for row in rows) < 1e-4
    assert "Lightning attention, forward, B1 T48 H2 16/32" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["mlstm_exp", "simple_gla", "gated_delta_rule"])
@pytest.mark.parametrize("which", ["fwd", "fwdbwd"])
def test_packed_sequences_and_more_value_heads(tmp_path: Path, op: str, which: str) -> None:
    path = tmp_path / "rows.json"
    shape = "1x60x2x16x32xN7" + "xHV4" * (op != "mlstm_exp")
    assert run("--op", op, "--shapes", shape, "--pass", which, "--json", str(path)) == 0
    rows = results.load(path)
    assert len(rows) == 3 and all("note" not in row for row in rows)
    value_heads = {"HV": 4} if op != "mlstm_exp" else {}
    assert rows[0]["shape"] == {"B": 1, "T": 60, "H": 2, "K": 16, "V": 32, "N": 7, **value_heads}


def test_mlstm_gets_the_offsets_of_packed_sequences(monkeypatch) -> None:
    given: list[list[int]] = []

    def spy(*tensors, cu_seqlens, backend):
        given.append(cu_seqlens.tolist())
        return mlstm_chunkwise(*tensors, cu_seqlens=cu_seqlens, backend=backend)

    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", spy)
    assert run("--op", "mlstm_exp", "--shapes", "1x64x1x16x16xN5", "--quick") == 0
    lengths = parse_shapes("1x64x1x16x16xN5")[0].lengths()
    assert given[0] == [0, *itertools.accumulate(lengths)] and all(x == given[0] for x in given)


@pytest.mark.slow
def test_triton_says_that_it_has_no_variable_length(capsys) -> None:
    options = ("--op", "mlstm_exp", "--shapes", "1x64x1x16x16xN4", "--backends", "triton,reference")
    assert run(*options, "--quick") == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "triton:xl_chunk_64: unsupported" in x]
    assert "mlstm_kernels has no variable length" in line


def test_a_state_that_crosses_packed_sequences_is_caught(monkeypatch, capsys) -> None:
    """Packed sequences taken for one are wrong from the second on, where the sample looks as well."""

    def one_sequence(*tensors, cu_seqlens, backend):
        return mlstm_chunkwise(*tensors, backend=backend)

    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", one_sequence)
    options = ("--op", "mlstm_exp", "--shapes", "1x64x1x16x16xN5", "--backends", "reference", "--quick")
    assert run(*options) == 1
    assert "FAILED: error against fp64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--op", "mlstm_sig", "--shapes", "1x32x2x16x16xHV4"),
            "shape HV: expected 2, mlstm_sig has no more",
        ),
        (
            ("--op", "retention", "--shapes", "1x32x2x16x16xHV4"),
            "shape HV: expected 2, retention has no more",
        ),
        (("--op", "lightning", "--layout", "bsnd"), "--layout: expected bnsd for lightning"),
    ],
)
def test_what_an_operator_does_not_have(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*options)


@pytest.mark.slow
def test_shapes_that_an_operator_does_not_have_are_left_out_and_told(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    shapes = "1x16x2x16x16,1x16x2x16x16xHV4"
    options = ("--op", "simple_gla,retention", "--shapes", shapes, "--backends", "reference:chunkwise")
    assert run(*options, "--json", str(path)) == 0
    found = [(row["op"], row["shape"].get("HV")) for row in results.load(path)]
    assert found == [("simple_gla", None), ("simple_gla", 4), ("retention", None)]
    told = "B1 T16 H2 HV4 16/16 left out: shape HV: expected 2, retention has no more value heads, got 4"
    assert told in capsys.readouterr().out


def test_fla_is_the_baseline_of_the_scalar_decay_family() -> None:
    for name, backends in (("simple_gla", None), ("retention", ["triton"]), ("lightning", ["triton:fla"])):
        found = find_variants(OPERATORS[name], backends, on_gpu=True)
        assert "triton:fla" in [variant.call for variant in found]
        assert not any(x.family == "triton" and x.call != "triton:fla" for x in found)


@pytest.mark.slow
def test_fla_without_a_gpu_says_so(capsys) -> None:
    options = ("--op", "retention", "--shapes", "1x32x2x16x16", "--quick", "--backends", "triton,reference")
    assert run(*options) == 1
    assert "triton:fla: unsupported: Triton kernels need a GPU" in capsys.readouterr().out


def test_quick_takes_the_first_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    shapes = "1x32x1x16x16,1x48x1x16x16"
    assert run("--op", "mlstm_sig", "--shapes", shapes, "--quick", "--json", str(path)) == 0
    assert {row["shape"]["T"] for row in json.loads(path.read_text())} == {32}


def test_a_run_that_is_cut_off_leaves_the_rows_that_it_has(monkeypatch, tmp_path: Path) -> None:
    run_contest, path = compare.run_contest, tmp_path / "rows.json"

    def cut_off(operator, shape, *rest):
        if shape.T == 48:
            raise KeyboardInterrupt
        return run_contest(operator, shape, *rest)

    monkeypatch.setattr(compare, "run_contest", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run("--op", "mlstm_sig", "--shapes", "1x32x1x16x16,1x48x1x16x16", "--json", str(path))
    assert {row["shape"]["T"] for row in results.load(path)} == {32}


@pytest.mark.slow
def test_a_contest_without_a_truth_fails_and_the_others_go_on(monkeypatch, tmp_path: Path, capsys) -> None:
    compute_truth, path = accuracy.compute_truth, tmp_path / "rows.json"

    def refuse(operator, inputs, shape, *rest, **options):
        if shape.T == 32:
            raise MemoryError("no room")
        return compute_truth(operator, inputs, shape, *rest, **options)

    monkeypatch.setattr(accuracy, "compute_truth", refuse)
    shapes = "1x32x1x16x16,1x48x1x16x16"
    assert run("--op", "mlstm_sig", "--shapes", shapes, "--json", str(path)) == 1
    assert {row["shape"]["T"] for row in results.load(path)} == {48}
    reason = "reference:chunkwise: FAILED: inputs or fp64 reference: MemoryError: no room"
    assert reason in capsys.readouterr().out


def test_a_plot_that_cannot_be_written_is_told_before_the_run(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    with pytest.raises(ValueError, match=r"plot: expected a file name with one of .*png.*, got .*rows.xyz"):
        run("--plot", str(tmp_path / "rows.xyz"))


@pytest.mark.parametrize("option", ["json", "csv", "plot"])
def test_a_missing_folder_is_told_before_the_run(option: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    path = tmp_path / "no such folder" / "rows.png"
    message = f"--{option}: expected a writable file, got {path} .there is no folder {path.parent}"
    with pytest.raises(UsageError, match=message):
        run(f"--{option}", str(path))
    assert not path.parent.exists()


def test_names_that_are_close_to_known_ones(capsys) -> None:
    for option, name, meant in (
        ("--op", "chunk_gated_delta", "chunk_gated_delta_rule"),
        ("--op", "gal", "gla"),
        ("--pass", "fwdbw", "fwdbwd"),
    ):
        with pytest.raises(SystemExit):
            parse(option, name)
        assert f"got {name!r} (did you mean {meant!r}?)" in capsys.readouterr().err
    for name, meant in (("tirton", "triton"), ("reference:recurent", "reference:recurrent")):
        with pytest.raises(UsageError, match=rf"^--backends: .+ got '{name}' \(did you mean '{meant}'\?\)"):
            run("--backends", name)


def test_public_functions_are_names_of_operators() -> None:
    assert parse("--op", "chunk_gla,mlstm_siging_chunkwise,gla").op == ["gla", "mlstm_sig"]
    assert parse("--op", ",".join(each.function for each in OPERATORS.values())).op == list(OPERATORS)


def test_a_message_about_an_option_names_it_once(capsys) -> None:
    for option in ("--op", "--shapes", "--backends", "--pass"):
        with pytest.raises(SystemExit):
            parse(option, ",")
        assert f"argument {option}: expected " in capsys.readouterr().err


def test_an_empty_list_of_backends(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--backends", ",")
    assert "argument --backends: expected at least one, got none" in capsys.readouterr().err


def test_a_failed_build_shows_the_compilers_lines(monkeypatch, capsys) -> None:
    def refuse(*tensors):
        raise BuildError("toy: the compiler fails\ntoy.cu(1): error: what is this", "do that")

    patch_backend(monkeypatch, refuse)
    assert run("--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--backends", "tk") == 1
    out = capsys.readouterr().out
    assert "tk: FAILED: BuildError: toy: the compiler fails" in out
    assert "toy.cu(1): error: what is this (do that)" in out


def test_a_wrong_result_of_ours_is_the_exit_status(monkeypatch, tmp_path: Path, capsys) -> None:
    patch_backend(monkeypatch, lambda *tensors: 2 * reference.mlstm_chunkwise(*tensors))
    path = tmp_path / "rows.json"
    options = ("--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--quick", "--json", str(path))
    assert run(*options, "--plot", str(tmp_path / "rows.png")) == 1
    assert json.loads(path.read_text()) == []
    assert not (tmp_path / "rows.png").exists()
    out = capsys.readouterr().out
    assert "FAILED" in out and "reference:chunkwise: FAILED: error against fp64: h 1.0e+00 > 1.0e-04" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "status"),
    [("triton", 1), ("triton:xl_chunk_64", 1), ("tk", 1)],
)
def test_an_unsupported_backend_counts_only_when_it_was_named(monkeypatch, backend: str, status: int) -> None:
    def refuse(*tensors):
        raise UnsupportedError("mlstm_chunkwise", "no GPU")

    patch_backend(monkeypatch, refuse)
    options = ("--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--quick")
    assert run(*options, "--backends", backend) == status


@pytest.mark.slow
def test_a_named_family_counts_only_when_none_of_its_variants_serves(monkeypatch) -> None:
    def refuse_all_but_one(*tensors, backend):
        if backend != "triton:xl_chunk_128":
            raise UnsupportedError("mlstm_chunkwise", "no GPU")
        return reference.mlstm_chunkwise(*tensors)

    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", refuse_all_but_one)
    assert run("--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--quick", "--backends", "triton") == 0


@pytest.mark.slow
def test_a_wrong_baseline_counts_only_when_it_was_named(monkeypatch) -> None:
    patch_backend(monkeypatch, lambda *tensors: 2 * reference.mlstm_chunkwise(*tensors))
    options = ("--op", "mlstm_exp", "--shapes", "1x32x1x16x16", "--quick", "--backends")
    assert run(*options, "triton") == 0
    assert run(*options, "triton:xl_chunk_64") == 1


def test_update_results_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="--update-results: expected a CUDA GPU"):
        run("--update-results")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quick",), "--quick runs fewer than 30 times"),
        ((), "name what is measured with --commit"),
    ],
)
def test_update_results_refuses_what_is_not_fit_for_the_record(monkeypatch, options, message) -> None:
    monkeypatch.setattr(environment, "git_commit", lambda root: None)
    args = parse("--update-results", *options)
    with pytest.raises(ValueError, match=message):
        compare.record_path(args, on_gpu=True)


def test_update_results_names_the_file_for_the_gpu(monkeypatch) -> None:
    monkeypatch.setattr(compare.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    args = parse("--update-results", "--commit", "abc", "--layout", "bsnd", "--forget-bias", "12")
    assert compare.record_path(args, on_gpu=True) == results.FOLDER / "h200.json"
    assert compare.record_path(parse(), on_gpu=True) is None


def test_a_run_that_is_cut_off_leaves_its_rows_on_record(monkeypatch, tmp_path: Path) -> None:
    path, run_contest = tmp_path / "h200.json", compare.run_contest

    def once(*args):
        if path.exists():
            raise KeyboardInterrupt
        return run_contest(*args)

    monkeypatch.setattr(compare, "record_path", lambda args, on_gpu: path)
    monkeypatch.setattr(compare, "run_contest", once)
    with pytest.raises(KeyboardInterrupt):
        run("--op", "mlstm_exp", "--shapes", "1x32x1x16x16,1x48x1x16x16", "--backends", "reference")
    assert {row["shape"]["T"] for row in results.load(path)} == {32}


@pytest.mark.parametrize(
    "options",
    [
        ("--op", "softmax"),
        ("--shapes", "large"),
        ("--pass", "bwd"),
        ("--dtype", "fp8"),
        ("--op", ","),
        ("--forget-bias", "nan"),
        ("--forget-bias", "much"),
    ],
)
def test_wrong_usage(options: tuple[str, str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_git_commit(tmp_path: Path) -> None:
    assert environment.git_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    assert environment.git_commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    assert environment.git_commit(tmp_path) == head
    (tmp_path / "b").write_text("not tracked")
    assert environment.git_commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert environment.git_commit(tmp_path) == f"{head}-dirty"


def test_nothing_is_missing_where_all_is_there(monkeypatch) -> None:
    full = {
        "gpus": [{}],
        "torch_sees_gpu": True,
        "nvcc": {},
        "thunderkittens": {},
        "prebuilt": {"kernels": 0},
        "libraries": dict.fromkeys(REPORT["libraries"], "1.0"),
    }
    monkeypatch.setattr(doctor, "report", lambda: full)
    monkeypatch.setattr(environment.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert environment.missing() == []
    monkeypatch.setattr(doctor, "report", lambda: full | {"nvcc": REPORT["nvcc"]})
    assert [line.partition(",")[0] for line in environment.missing()] == ["no nvcc"]
    full["prebuilt"] = {"kernels": 1}
    assert environment.missing() == []
    monkeypatch.setattr(environment.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(environment.torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert environment.missing() == ["no Hopper GPU (NVIDIA A100): the ThunderKittens kernels cannot run"]


@pytest.mark.parametrize(
    ("gpus", "cuda", "reason"),
    [
        ([], None, "nvidia-smi is absent or reports no device"),
        ([{}], None, "torch is a CPU build"),
        ([{}], "13.0", "torch for CUDA 13.0 sees none: CUDA_VISIBLE_DEVICES, or an old driver"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, gpus: list[dict], cuda: str | None, reason: str) -> None:
    monkeypatch.setattr(doctor, "report", lambda: REPORT | {"gpus": gpus, "torch_cuda": cuda})
    assert environment.missing()[0].startswith(f"no CUDA GPU ({reason}): ")


@pytest.mark.parametrize(("capability", "fetched"), [((9, 0), True), ((8, 0), False)])
def test_thunderkittens_is_fetched_where_the_kernels_run(monkeypatch, capability, fetched: bool) -> None:
    calls: list[bool] = []

    def find(clone: bool = True) -> None:
        calls.append(clone)
        raise BuildError("no network")

    monkeypatch.setattr(environment.build, "find_thunderkittens", find)
    environment.fetch_thunderkittens()
    monkeypatch.setattr(environment.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment.torch.cuda, "get_device_capability", lambda: capability)
    environment.fetch_thunderkittens()
    assert calls == [True] * fetched
