"""The doctor's report: facts where something is found, an error with its remedy where not."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from pathlib import Path

import pytest
import torch

from tfla_tk import doctor, env
from tfla_tk.build import prebuilt
from tfla_tk.cli import main
from tfla_tk.core.dispatch import OPERATORS


def test_there_is_an_example_call_for_every_operator() -> None:
    assert set(doctor.EXAMPLES) == set(OPERATORS)


def test_the_report_is_plain_values() -> None:
    found = doctor.report()
    assert json.loads(json.dumps(found)) == found
    assert found["libraries"]["torch"]
    assert set(found["environment"]) == {variable.name for variable in env.VARIABLES}
    for name, uses in found["operators"].items():
        assert set(uses) == {"inference", "training"}, name
        for choice in uses.values():
            assert choice["backend"] in choice["reasons"]
            assert all(choice["reasons"].values())


def test_triton_of_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's nightly builds bring it, pytorch-triton."""
    version, true = doctor.version("triton"), importlib.metadata.version

    def unknown(distribution: str) -> str:
        if distribution == "triton":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return true(distribution)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert version is not None
    assert doctor.version("triton") == version
    assert doctor.version("no such distribution") is None


def test_the_text_tells_the_choice_and_why() -> None:
    found = doctor.report()
    text = doctor.render(found)
    for name, uses in found["operators"].items():
        for use, choice in uses.items():
            head = f"{name}, {use}: {choice['backend']}\n"
            assert head in text
            verdicts = text[text.index(head) :].split("\n\n")[0]
            assert all(verdict in verdicts for verdict in choice["reasons"].values())


SLOW = ("reference", "reference")
ON_TRITON = "every operator runs on Triton or the PyTorch reference here."
ON_REFERENCE = "every operator runs on the PyTorch reference here."


@pytest.mark.parametrize(
    ("backends", "gpus", "sees_gpu", "verdict"),
    [
        (("tk", "tk"), ["9.0"], True, "The kernels serve every operator."),
        (("tk", "triton"), ["9.0"], True, "The kernels serve every operator but a."),
        (("triton", "triton"), ["9.0"], True, f"no usable nvcc: {ON_TRITON}"),
        (("triton", "reference"), ["8.9"], True, f"No Hopper GPU: {ON_TRITON}"),
        (SLOW, ["9.0"], False, f"torch sees no GPU: {ON_REFERENCE}"),
        (SLOW, [], False, f"No Hopper GPU: {ON_REFERENCE}"),
    ],
)
def test_the_verdict_comes_last(
    backends: tuple[str, str], gpus: list[str], sees_gpu: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"tk": "no: no usable nvcc:\n  PATH: nothing"}
    uses = {
        use: {"backend": backend, "reasons": told}
        for use, backend in zip(("inference", "training"), backends, strict=True)
    }
    step = uses | {"training": uses["training"] | {"backend": "reference"}}
    monkeypatch.setattr(doctor, "OPERATORS", ["a", "a_step"])
    monkeypatch.setattr(doctor, "_choices", {"a": uses, "a_step": step}.get)
    monkeypatch.setattr(doctor, "_gpus", lambda: [dict.fromkeys(doctor._GPU_FIELDS, cap) for cap in gpus])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    assert doctor.render(doctor.report()).endswith(f"\n\n{verdict}")


def test_without_a_gpu_nothing_else_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.report()
    reasons = {
        why
        for uses in found["operators"].values()
        for use in uses.values()
        for why in use["reasons"].values()
    }
    assert reasons == {"no: torch sees no GPU", "yes"}


def test_fla_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(doctor.LIBRARIES, "1.0") | {"triton": None}
    text = doctor.render(doctor.report() | {"libraries": versions})
    assert text.count("1.0 (installed, but it needs triton)\n") == 2


def test_what_is_missing_is_told_with_its_remedy(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFLA_TK_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor.report()
    assert found["gpus"] == []
    assert "does not exist" in found["nvcc"]["error"]
    assert "not tried" in found["thunderkittens"]["error"]
    assert "tfla-tk build" in found["thunderkittens"]["remedy"]
    assert found["cache"] == {"path": str(isolated_environment), "writable": True, "modules": 0}
    text = doctor.render(found)
    assert "GPU                         none" in text
    for part in ("nvcc", "thunderkittens"):
        assert found[part]["remedy"] in text
    assert f"TFLA_TK_NVCC                {tmp_path / 'nvcc'}" in text


def test_what_is_found_is_told_with_its_look_up(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/kittens.cuh").touch()
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path))
    found = doctor.report()["thunderkittens"]
    assert (found["path"], found["found_by"]) == (str(tmp_path), "THUNDERKITTENS_ROOT")


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 580.1, 9.0, 143771 MiB'\necho 'NVIDIA L4, 580.1, 8.9, 23034 MiB'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = doctor.report()
    assert [gpu["compute_cap"] for gpu in found["gpus"]] == ["9.0", "8.9"]
    text = doctor.render(found)
    assert "NVIDIA H200, compute capability 9.0, driver 580.1" in text
    assert "NVIDIA L4, compute capability 8.9; the tk kernels need 9.0, driver 580.1" in text


def test_a_failing_nvidia_smi_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert doctor.report()["gpus"] == []


FAULTS: dict[str, tuple[object, str]] = {
    "libraries": (doctor, "triton_version"),
    "gpus": (doctor, "_gpus"),
    "torch": (torch.cuda, "is_available"),
    "platform": (doctor.platform, "platform"),
    "nvcc": (doctor, "find_toolchain"),
    "thunderkittens": (doctor, "find_thunderkittens"),
    "cache": (doctor, "cache_root"),
    "prebuilt": (doctor, "shipped_instances"),
    "which": (doctor, "which"),
}


ERRORS = PermissionError(13, "denied"), RuntimeError("denied"), ValueError("denied")


@pytest.mark.parametrize(("fault", "error"), [*zip(FAULTS, itertools.cycle(ERRORS), strict=False)])
def test_a_section_that_fails_hides_no_other(
    fault: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = doctor.report()

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(*FAULTS[fault], fail)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"not usable: {type(error).__name__}: " in text and "denied" in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(whole) and set(found["operators"]) == set(OPERATORS)
    for name, lines in (
        ("libraries", "torch CUDA"),
        ("which", "torch CUDA"),
        ("cache", "mlstm_step, training:"),
    ):
        assert fault != name or lines in text


def test_nothing_of_the_machine_makes_the_report_fail(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, no_home: None
) -> None:
    monkeypatch.delenv("TFLA_TK_CACHE_DIR")
    text = doctor.render(doctor.report())
    assert text.count("not usable: there is no home directory for the cache") == 2
    assert "remedy: set TFLA_TK_CACHE_DIR" in text
    assert "mlstm_siging_step, training: " in text


def test_a_cache_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, of_nobody: Path) -> None:
    closed = of_nobody / "closed"
    (closed / "cache/modules").mkdir(parents=True)
    closed.chmod(0)
    monkeypatch.setenv("TFLA_TK_CACHE_DIR", str(closed / "cache"))
    found = doctor.report()
    assert found["cache"] == {"path": str(closed / "cache"), "writable": False, "modules": 0}
    assert "not writable" in doctor.render(found)


def test_kernels_that_come_with_the_package(
    isolated_environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = doctor.shipped_instances()[:3]
    monkeypatch.setattr(doctor, "shipped_instances", lambda: shipped)
    assert doctor.report()["prebuilt"] == {"cuda": None, "kernels": 0, "of": len(shipped)}
    assert "none came with the package; each is compiled on its first call" in doctor.render(doctor.report())
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    (tmp_path / "kernel").write_text("code")
    for known in (shipped[:1], shipped):
        prebuilt._read.cache_clear()
        prebuilt.write(tmp_path, (13, 0), dict.fromkeys(known, tmp_path / "kernel"))
        came = f"{len(known)} of {len(shipped)} came with the package, compiled by CUDA 13.0"
        others = "; others are compiled on their first call" * (len(known) == 1)
        assert f"kernels                     {came}{others}\n" in doctor.render(doctor.report())
