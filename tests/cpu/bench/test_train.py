from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import UnsupportedError, doctor, reference
from tfla_tk.bench import operators, text, train
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.model import LanguageModel
from tfla_tk.bench.train import Distance

STEPS = 32
Cell = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")


def run(path: Path, *options: str, steps: int = STEPS) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command."""
    status = main(["train", "--steps", str(steps), "--commit", "abc", "--json", str(path), *options])
    return status, json.loads(path.read_text())


def patch_tk(monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    """The backend tk computes `cell`; every other one is the chunkwise reference."""

    def function(*tensors: Tensor, backend: str) -> Tensor:
        return cell(*tensors) if backend == "tk" else reference.mlstm_chunkwise(*tensors)

    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", function)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = train.Preset(
        blocks=1, width=32, heads=2, batch=2, sequence=32, steps=3, rate=1e-2, text_bytes=2**12
    )
    monkeypatch.setitem(train.PRESETS, "cpu", preset)


@pytest.mark.slow
def test_preset_trains_and_forms_of_the_reference_agree(tmp_path: Path, capsys) -> None:
    options = ("--backends", "reference:recurrent,reference", "--plot", str(tmp_path / "curves.png"))
    status, found = run(tmp_path / "run.json", *options, "--input-bias", "0")
    assert status == 0
    baseline, other, recurrent, again = found["trainings"]
    assert [each["name"] for each in found["trainings"]] == [
        "reference",
        "reference, other order",
        "reference:recurrent",
        "reference",
    ]
    assert len(baseline["losses"]) == STEPS and len(baseline["curve"]) == STEPS - STEPS // 10 + 1
    assert baseline["losses"][0] == pytest.approx(math.log(256), abs=0.3)
    # below what a model without its mLSTM layers can reach
    assert baseline["curve"][-1] < 0.95 * found["bigram_entropy"] < 1.8
    assert again["losses"] == baseline["losses"] and again["distance"] == {"max": 0, "rms": 0}
    assert max(abs(a - b) for a, b in zip(recurrent["losses"], baseline["losses"], strict=True)) < 1e-3
    assert other["losses"] != baseline["losses"]
    assert 0.01 < other["distance"]["rms"] < other["distance"]["max"] < 0.5
    assert found["band"] == other["distance"]
    assert baseline["distance"] is None and recurrent["distance"]["max"] < 1e-3
    for each in found["trainings"]:
        assert (each["status"], each["dtype"], each["peak_mem_mb"]) == ("ok", "fp32", None)
        assert each["tokens_per_s"] == pytest.approx(8 * 128 / each["step_ms"] * 1e3)
    assert (found["op"], found["seed"], found["commit"], found["gpu"]) == ("mlstm_exp", 0, "abc", None)
    assert found["preset"]["steps"] == STEPS and found["preset"]["input_bias"] == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert f"heads of 16/32, input bias 0; {STEPS} steps of 8 x 128 bytes" in out
    assert f"{baseline['curve'][-1]:.4f}" in out


def wrong_scale(*tensors: Tensor) -> Tensor:
    """Every other token with the wrong sign."""
    h = reference.mlstm_chunkwise(*tensors)
    return h * torch.tensor([1.0, -1.0]).repeat(h.shape[2] // 2)[:, None]


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """dk of the wrong sign."""
    return reference.mlstm_chunkwise(q, 2 * k.detach() - k, v, i, f)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [wrong_scale, wrong_gradient])
def test_a_wrong_backend_leaves_the_band(monkeypatch, tmp_path: Path, capsys, cell: Cell) -> None:
    patch_tk(monkeypatch, cell)
    status, found = run(tmp_path / "run.json", "--backends", "tk", "--input-bias", "-3")
    assert status == 1
    training = found["trainings"][-1]
    assert training["status"] == "OUTSIDE" and len(training["curve"]) == len(found["trainings"][0]["curve"])
    assert any(training["distance"][key] > 1.1 * found["band"][key] for key in ("max", "rms"))
    assert "tk: farther from the reference than another order of batches" in capsys.readouterr().out


@pytest.mark.slow
def test_rounding_to_bf16_stays_in_the_band(monkeypatch, tmp_path: Path) -> None:
    def rounded(*tensors: Tensor) -> Tensor:
        return reference.mlstm_chunkwise(*(x.bfloat16() for x in tensors[:3]), *tensors[3:]).float()

    patch_tk(monkeypatch, rounded)
    status, found = run(tmp_path / "run.json", "--backends", "tk", "--input-bias", "-3")
    assert status == 0
    assert 0 < found["trainings"][-1]["distance"]["rms"] < 0.6 * found["band"]["rms"]


@pytest.mark.slow
def test_autocast_is_the_same_in_all_trainings_that_are_judged(tiny, tmp_path: Path) -> None:
    options = ("--dtype", "bf16", "--backends", "reference:recurrent")
    status, found = run(tmp_path / "run.json", *options, steps=3)
    assert status == 0
    baseline, _, plain, recurrent = found["trainings"]
    assert [each["backend"] for each in found["trainings"]] == ["reference"] * 3 + ["reference:recurrent"]
    assert [(each["name"], each["dtype"]) for each in found["trainings"]] == [
        ("reference", "bf16"),
        ("reference, other order", "bf16"),
        ("reference, no autocast", "fp32"),
        ("reference:recurrent", "bf16"),
    ]
    assert plain["losses"] == run(tmp_path / "fp32.json", steps=3)[1]["trainings"][0]["losses"]
    assert recurrent["distance"]["rms"] < plain["distance"]["rms"]
    assert baseline["losses"] != plain["losses"]


def test_a_training_without_autocast_is_shown_and_not_judged() -> None:
    names = (train.BASELINE, train.OTHER_ORDER, train.NO_AUTOCAST, "tk")
    curves = ([1.0, 1.0], [1.1, 1.0], [2.0, 1.0], [2.0, 1.0])
    trainings = [
        train.Training(name, "tk" if name == "tk" else train.BASELINE, "bf16", curve=curve)
        for name, curve in zip(names, curves, strict=True)
    ]
    assert train.judge(trainings).max == pytest.approx(0.1)
    plain, tk = trainings[2:]
    assert plain.distance == tk.distance == Distance(1.0, math.sqrt(0.5))
    assert (plain.status, tk.status) == ("ok", "OUTSIDE")


@pytest.mark.slow
def test_unsupported_backends_are_reported(tiny, tmp_path: Path, capsys) -> None:
    status, found = run(tmp_path / "run.json", "--op", "sig", steps=3)
    assert status == 0 and found["op"] == "mlstm_sig"
    assert [(each["name"], each["status"]) for each in found["trainings"][2:]] == [
        ("tk", "unsupported"),
        ("triton", "unsupported"),
        ("reference:recurrent", "ok"),
        ("reference:parallel", "ok"),
    ]
    refused = found["trainings"][2]
    assert refused["losses"] == [] and refused["distance"] is None and refused["step_ms"] is None
    assert "on cpu" in refused["reason"]
    out = capsys.readouterr().out
    assert f"tk: {refused['reason']}" in out and "mLSTM, sigmoid input gate" in out
    # asked for by name, it is the command's failure
    assert run(tmp_path / "run.json", "--backends", "tk", steps=3)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "no gradient", "not finite"])
def test_a_failure_is_the_exit_status_and_the_others_go_on(
    tiny, monkeypatch, tmp_path: Path, fault: str
) -> None:
    def cell(*tensors: Tensor) -> Tensor:
        if fault == "raises":
            raise RuntimeError("the launch was refused")
        if fault == "no gradient" and tensors[0].requires_grad:
            raise UnsupportedError("tk", "it has no backward", "use another backend")
        return reference.mlstm_chunkwise(*tensors) * math.nan

    patch_tk(monkeypatch, cell)
    status, found = run(tmp_path / "run.json", "--backends", "tk,reference", steps=3)
    assert status == 1
    failed, after = found["trainings"][2:]
    expected = {
        "raises": ("FAILED", "RuntimeError: the launch was refused"),
        "no gradient": ("unsupported", "it has no backward (use another backend)"),
        "not finite": ("FAILED", "the loss of step 0 is not finite"),
    }
    assert (failed["status"], failed["reason"]) == expected[fault]
    assert after["status"] == "ok"


@pytest.mark.slow
def test_a_failure_without_autocast_is_the_exit_status(tiny, monkeypatch, tmp_path: Path) -> None:
    def function(*tensors: Tensor, backend: str) -> Tensor:
        h = reference.mlstm_chunkwise(*tensors)
        return h * math.nan if tensors[0].dtype == torch.float32 else h

    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", function)
    options = ("--dtype", "bf16", "--backends", "reference")
    status, found = run(tmp_path / "run.json", *options, steps=3)
    assert status == 1
    assert [each["status"] for each in found["trainings"]] == ["ok", "ok", "FAILED", "ok"]


@pytest.mark.slow
def test_seeds(tiny, tmp_path: Path) -> None:
    losses = {}
    for seed in (0, 0, 1):
        _, found = run(tmp_path / "run.json", "--backends", "reference", "--seed", str(seed), steps=3)
        curve = found["trainings"][0]["losses"]
        assert losses.setdefault(seed, curve) == curve
    assert losses[0] != losses[1]


def test_bad_options(tiny, tmp_path: Path, capsys) -> None:
    for option in ("--json", "--plot"):
        path = tmp_path / f"folder{option}.png"
        path.mkdir()
        assert main(["train", option, str(path)]) == 2
        assert f"{option}: expected a writable file, got {path}" in capsys.readouterr().err
    assert main(["train", "--steps", "0"]) == 2
    assert "--steps: expected a positive number, got 0" in capsys.readouterr().err
    for backends, message in (("nonsense", "got 'nonsense'"), (",", "expected at least one")):
        with pytest.raises(SystemExit):
            main(["train", "--backends", backends])
        assert message in capsys.readouterr().err


def test_a_baseline_that_fails_is_an_error(tiny, monkeypatch, capsys) -> None:
    monkeypatch.setattr(operators.tfla_tk, "mlstm_chunkwise", lambda *tensors, backend: tensors[2] * math.nan)
    assert main(["train", "--backends", "tk"]) == 1
    assert "reference: the loss of step 0 is not finite" in capsys.readouterr().err


def test_the_model_calls_the_cell_as_models_do() -> None:
    seen: list[tuple[Tensor, ...]] = []

    def cell(*tensors: Tensor) -> Tensor:
        seen.append(tensors)
        return reference.mlstm_chunkwise(*tensors)

    model = LanguageModel(blocks=2, width=64, heads=4, input_bias=-10.0, cell=cell)
    logits = model(torch.randint(256, (2, 24)))
    assert logits.shape == (2, 24, 256) and len(seen) == 2
    q, k, v, i, f = seen[0]
    assert q.shape == k.shape == (2, 4, 24, 8) and v.shape == (2, 4, 24, 16)
    assert all(x.transpose(1, 2).is_contiguous() and not x.is_contiguous() for x in (q, k, v))
    torch.testing.assert_close(i, torch.full_like(i, 15 * math.tanh(-10 / 15)))
    torch.testing.assert_close(f[0, :, 0], 15 * torch.tanh(torch.linspace(3, 6, 4) / 15))


def test_text_follows_from_its_seed() -> None:
    made = text.make_text(5000, 0)
    assert len(made) == 5000 and made == text.make_text(6000, 0)[:5000] != text.make_text(5000, 1)
    for line in made.decode("ascii").splitlines()[:-1]:
        if "=" in line:
            left, _, right = line.partition(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)
        elif "yes" in line:
            first, again = line.removesuffix(".").split("; yes, ")
            assert first == again
        else:
            while line != (
                line := line.replace("()", "").replace("[]", "").replace("{}", "").replace("<>", "")
            ):
                pass
            assert line == ""


def test_bigram_entropy() -> None:
    assert text.bigram_entropy(b"ab" * 50) == 0
    # after "a" either of two bytes, after those always "a"
    assert text.bigram_entropy(b"abac" * 100 + b"a") == pytest.approx(0.5 * math.log(2))


def test_distance() -> None:
    assert train.smooth([4.0, 2.0, 0.0, 2.0], 2) == [3.0, 1.0, 1.0]
    found = Distance.between([1.0, 2.0], [1.0, 1.0])
    assert found == Distance(1.0, math.sqrt(0.5))
    assert found.within(Distance(1.0, 0.8)) and not found.within(Distance(2.0, 0.7))
    assert not found.within(Distance(0.9, 0.8))
