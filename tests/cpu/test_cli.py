"""The commands and their exit status."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tfla_tk import build, doctor
from tfla_tk.bench import compare, gradcheck
from tfla_tk.build import EXTENSION, Built, Instance, Launcher, prebuilt
from tfla_tk.build.compiler import CompileResult
from tfla_tk.build.toolchain import Toolchain
from tfla_tk.cli import main

TOY = Launcher("toy", "toy/launcher.cu")


def toy(name: str, dtype: str) -> Instance:
    return Instance(f"toy_{name}", TOY, "toy/kernel.cuh", (name,), "toy", dtype)


SHIPPED = [toy("a", "bf16"), toy("b", "fp16"), toy("c", "")]
LOG = "ptxas info : Used 168 registers"


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[build.Artifact]:
    """Three shipped instances whose compilation is only noted: the list of what is asked for."""
    asked: list[build.Artifact] = []
    (tmp_path / "compiled").write_text("code")

    def ensure(artifacts: list[build.Artifact], jobs: int, progress: Callable[[Built], None]) -> list[Built]:
        asked.extend(artifacts)
        built = [Built({artifact: tmp_path / "compiled"}, LOG, True, 1.5) for artifact in artifacts]
        for one in built:
            progress(one)
        return built

    monkeypatch.setattr(build, "shipped_instances", lambda: SHIPPED)
    monkeypatch.setattr(build, "all_instances", lambda: [*SHIPPED, toy("d", "bf16")])
    monkeypatch.setattr(build, "ensure", ensure)
    return asked


WRONG_USAGE = ([], ["nonsense"], ["build", "--jobs", "0"], ["build", "--jobs", "x"])
HELP = [[*name, "--help"] for name in ([], ["doctor"], ["build"], ["compare"], ["gradcheck"])]


@pytest.mark.parametrize(
    ("arguments", "status"), [*((each, 2) for each in WRONG_USAGE), *((each, 0) for each in HELP)]
)
def test_help_and_wrong_usage(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == status
    assert "usage: tfla-tk" in capsys.readouterr()[1 if status else 0]


@pytest.mark.parametrize(("chosen", "threads"), [(None, 1), ("2", 2)])
def test_commands_take_one_thread_of_a_cpu_unless_told_otherwise(
    chosen: str | None, threads: int, shipped: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", chosen or "")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # as PyTorch does at its start where it may
        assert main(["build", "--list"]) == 0
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_python_m_gives_the_installed_version() -> None:
    command = [sys.executable, "-m", "tfla_tk", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"tfla_tk {doctor.version('tfla_tk')}\n"


def test_doctor_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "ThunderKittens".lower() in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["libraries"]["torch"]


def test_build_compiles_what_is_shipped(
    shipped: list[build.Artifact], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build"]) == 0
    assert shipped == [EXTENSION, TOY, *SHIPPED]
    out = capsys.readouterr().out
    assert "toy_a: 1.5 s, registers 168" in out
    assert "3 kernels ready" in out


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--match", "*_b"), [SHIPPED[1]]),
        (("--dtype", "bf16"), [SHIPPED[0], SHIPPED[2]]),  # and what serves all dtypes
        (("--dtype", "fp16", "--match", "*_[ab]"), [SHIPPED[1]]),
    ],
)
def test_build_takes_what_is_asked_for(
    options: tuple[str, ...], wanted: list[Instance], shipped: list[build.Artifact]
) -> None:
    assert main(["build", *options]) == 0
    assert shipped == [EXTENSION, TOY, *wanted]


def test_build_leaves_what_comes_with_the_package(
    shipped: list[build.Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prebuilt, "find", lambda x: None if x is SHIPPED[2] else tmp_path / "compiled")
    assert main(["build"]) == 0
    assert shipped == [SHIPPED[2]]


def test_build_copies_what_a_wheel_takes(
    shipped: list[build.Artifact], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolchain = Toolchain(tmp_path, tmp_path, tmp_path, (13, 1), "nvcc 13.1", "PATH")
    monkeypatch.setattr(build, "find_toolchain", lambda: toolchain)
    monkeypatch.setattr(prebuilt, "_key", build.name_of)
    monkeypatch.setattr(prebuilt, "_headers_key", "".join)
    assert main(["build", "--dtype", "fp16", "--copy", str(tmp_path / "copy")]) == 0
    told = json.loads((tmp_path / "copy/index.json").read_text())
    assert told["cuda"] == [13, 1] and set(told["files"]) == {EXTENSION, "toy", "toy_b", "toy_c"}
    assert {(tmp_path / "copy" / file).read_text() for file in told["files"].values()} == {"code"}


def test_build_lists_without_compiling(
    shipped: list[build.Artifact], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["toy_a", "toy_b", "toy_c"]
    assert main(["build", "--list", "--all"]) == 0
    assert capsys.readouterr().out.split() == ["toy_a", "toy_b", "toy_c", "toy_d"]
    assert shipped == []


def test_a_name_that_matches_nothing(
    shipped: list[build.Artifact], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--match", "gla_*"]) == 2
    assert "no kernel is named 'gla_*'; `tfla-tk build --list` prints the names" in capsys.readouterr().err


@pytest.mark.parametrize("refused", [False, True])
def test_build_writes_sass(
    refused: bool,
    shipped: list[build.Artifact],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of a kernel that it would refuse."""
    serialised = (
        "\nptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )
    log = LOG + serialised * refused

    def compile_instance(instance: Instance, folder: Path) -> CompileResult:
        return CompileResult(folder / f"{instance.name}.cubin", log, 0.5)

    monkeypatch.setattr(build, "compile_instance", compile_instance)
    monkeypatch.setattr(build, "disassemble", lambda cubin: f"SASS of {cubin.name}")
    assert main(["build", "--sass", str(tmp_path)]) == refused
    assert (tmp_path / "toy_a.sass").read_text() == "SASS of toy_a.cubin"
    assert (tmp_path / "toy_b.ptxas.log").read_text() == log
    out, error = capsys.readouterr()
    assert ("3 kernels ready" in out) != refused
    assert all((f"{name}: ptxas reports" in error) == refused for name in ("toy_a", "toy_b"))


def test_build_without_nvcc_exits_with_1(
    isolated_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "shipped_instances", lambda: SHIPPED)
    monkeypatch.setenv("TFLA_TK_NVCC", str(tmp_path / "nvcc"))
    assert main(["build"]) == 1
    error = capsys.readouterr().err
    assert "does not exist" in error
    assert "Remedy:" in error


def test_a_wrong_environment_variable_exits_with_1(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFLA_TK_JOBS", "many")
    assert main(["build"]) == 1
    assert "TFLA_TK_JOBS: expected a positive integer, got 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "command"), [("compare", compare), ("gradcheck", gradcheck)])
def test_a_command_of_bench_is_run_and_its_status_returned(
    name: str, command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(command, "run", run)
    assert main([name]) == 3
    assert len(seen) == 1


# by "compare" and "gradcheck"; by one of them alone
WRONG = [
    (("--backends", "cuda"), "--backends: expected tk, triton, "),
    (("--backends", "tk:fast"), "--backends: expected a variant such as tk, got 'tk:fast'"),
    (("--shapes", "1x64x2x16x16xHV4"), "--shapes: shape HV: expected 2, gla has no more value heads"),
]
WRONG_OF_COMPARE = [
    (("--layout", "bsnd"), "--layout: expected bnsd for gla"),
    (("--plot", "rows.xyz"), "--plot: expected a file name with one of"),
    (("--backends", "tilelang"), "--op: expected any of gated_delta_rule for the backend tilelang, got gla"),
]


WRONG_OF_GRADCHECK = [
    (("--shapes", "1x1x1x16x16"), "--shapes: expected at least 2 tokens"),
    (
        ("--shapes", "1x64x1x16x16xN4", "--cases", "default+last"),
        "--cases: expected none with +last for packed sequences",
    ),
    (("--backends", "tilelang"), "--backends: expected tk, triton, reference or name:variant"),
]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        *((command, *wrong) for command in ("compare", "gradcheck") for wrong in WRONG),
        *(("compare", *wrong) for wrong in WRONG_OF_COMPARE),
        *(("gradcheck", *wrong) for wrong in WRONG_OF_GRADCHECK),
    ],
)
def test_wrong_options_exit_with_2_before_anything_runs(
    command: str,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    monkeypatch.setattr(gradcheck, "run_case", pytest.fail)
    assert main([command, "--op", "gla", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("compare", "--json"), ("compare", "--csv"), ("gradcheck", "--json")]
)
def test_a_file_that_cannot_be_written_is_told_before_the_run(
    command: str,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    monkeypatch.setattr(gradcheck, "run_case", pytest.fail)
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path, tmp_path / "file" / "rows"):
        assert main([command, "--op", "gla", "--shapes", "1x16x1x16x16", option, str(path)]) == 2
        assert f"{option}: expected a writable file, got {path} (" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_a_run_that_is_cut_off_leaves_no_empty_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_contest", interrupt)
    (tmp_path / "earlier.csv").write_text("kept")
    (tmp_path / "new").mkdir()
    files = ("--json", str(tmp_path / "new" / "rows.json"), "--csv", str(tmp_path / "earlier.csv"))
    assert main(["compare", "--op", "gla", "--shapes", "1x16x1x16x16", *files]) == 130
    assert not list((tmp_path / "new").iterdir())
    assert (tmp_path / "earlier.csv").read_text() == "kept"


def test_a_reader_that_has_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["build", "--list"]) == 1
    assert capsys.readouterr().err == ""


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "report", interrupt)
    assert main(["doctor"]) == 130
