"""`python -m tfla_tk.bench train` at toy size: which backends it finds wrong, what it tells of failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tfla_tk
from tfla_tk import UnsupportedError, reference
from tfla_tk.bench import text, train
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.model import LanguageModel
from tfla_tk.bench.train import Distance

STEPS = 32
Cell = Callable[..., Tensor]


@pytest.fixture
def run(command):
    return partial(command, "train", "--steps", str(STEPS))


@pytest.fixture
def run_tiny(monkeypatch: pytest.MonkeyPatch, command):
    preset = train.Preset(1, 32, 2, batch=2, sequence=32, steps=3, rate=1e-2, text_bytes=2**12)
    monkeypatch.setitem(train.PRESETS, "cpu", preset)
    return partial(command, "train")


def patch_tk(monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    """The backend tk computes `cell`; every other one is the chunkwise reference."""

    def function(*tensors: Tensor, backend: str) -> Tensor:
        return cell(*tensors) if backend == "tk" else reference.mlstm_chunkwise(*tensors)

    monkeypatch.setattr(tfla_tk, "mlstm_chunkwise", function)


@pytest.mark.slow
def test_preset_trains_and_forms_of_the_reference_agree(run, tmp_path: Path) -> None:
    options = ("--backends", "reference:recurrent,reference", "--plot", str(tmp_path / "curves.png"))
    status, found, out, _ = run(*options, "--input-bias", "0", "--commit", "abc")
    assert status == 0
    baseline, other, recurrent, again = found["trainings"]
    names = ["reference", "reference, other order", "reference:recurrent", "reference"]
    assert [each["name"] for each in found["trainings"]] == names
    assert len(baseline["losses"]) == STEPS and len(baseline["curve"]) == STEPS - STEPS // 10 + 1
    assert baseline["losses"][0] == pytest.approx(math.log(256), abs=0.3)
    assert baseline["curve"][-1] < 1.75
    assert again["losses"] == baseline["losses"] and again["distance"] == {"max": 0, "rms": 0}
    assert max(abs(a - b) for a, b in zip(recurrent["losses"], baseline["losses"], strict=True)) < 1e-3
    assert 0.01 < other["distance"]["rms"] < other["distance"]["max"] < 0.5
    assert found["band"] == other["distance"]
    assert baseline["distance"] is None and recurrent["distance"]["max"] < 1e-3
    assert all((each["status"], each["peak_mem_mb"]) == ("ok", None) for each in found["trainings"])
    assert (found["op"], found["dtype"], found["seed"], found["commit"]) == ("mlstm_exp", "fp32", 0, "abc")
    assert found["preset"]["steps"] == STEPS and found["preset"]["input_bias"] == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert f"heads of 16/32, input bias 0; {STEPS} steps of 8 x 128 bytes" in out
    assert f"{baseline['curve'][-1]:.4f}" in out


def wrong_sign(*tensors: Tensor) -> Tensor:
    """Every other token with the wrong sign."""
    h = reference.mlstm_chunkwise(*tensors)
    return h * torch.tensor([1.0, -1.0]).repeat(h.shape[2] // 2)[:, None]


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """dk of the wrong sign."""
    return reference.mlstm_chunkwise(q, 2 * k.detach() - k, v, i, f)


def rounded(*tensors: Tensor) -> Tensor:
    return reference.mlstm_chunkwise(*(x.bfloat16() for x in tensors[:3]), *tensors[3:]).float()


@pytest.mark.slow
@pytest.mark.parametrize("cell", [wrong_sign, wrong_gradient, rounded])
def test_a_wrong_backend_leaves_the_band_and_rounding_does_not(monkeypatch, run, cell: Cell) -> None:
    patch_tk(monkeypatch, cell)
    status, found, out, _ = run("--backends", "tk", "--input-bias", "-3")
    training, band = found["trainings"][-1], found["band"]
    if cell is rounded:
        assert status == 0 and 0 < training["distance"]["rms"] < 0.6 * band["rms"]
    else:
        assert status == 1 and training["status"] == "OUTSIDE"
        assert any(training["distance"][key] > 1.1 * band[key] for key in band)
        assert "tk: farther from the reference than another order of batches" in out


def test_autocast_rounds_all_trainings_alike(run_tiny) -> None:
    low, full = (
        run_tiny("--dtype", dtype, "--backends", "reference:recurrent").rows["trainings"]
        for dtype in ("bf16", "fp32")
    )
    assert low[0]["losses"] != full[0]["losses"]
    apart = Distance.between(low[0]["curve"], full[0]["curve"])
    assert low[2]["distance"]["rms"] < apart.rms


def test_unsupported_backends_are_reported(run_tiny) -> None:
    status, found, out, _ = run_tiny("--op", "sig")
    assert status == 0 and found["op"] == "mlstm_sig"
    assert [(each["name"], each["status"]) for each in found["trainings"][2:]] == [
        ("tk", "unsupported"),
        ("triton", "unsupported"),
        ("reference:recurrent", "ok"),
        ("reference:parallel", "ok"),
    ]
    refused = found["trainings"][2]
    assert refused["losses"] == [] and refused["distance"] is None and refused["step_ms"] is None
    assert f"tk: {refused['reason']}" in out and "on cpu" in refused["reason"]
    # asked for by name, it is the command's failure
    assert run_tiny("--backends", "tk").status == 1


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("raises", "FAILED", "RuntimeError: the launch was refused"),
        ("no gradient", "unsupported", "it has no backward (use another backend)"),
        ("not finite", "FAILED", "the loss of step 0 is not finite"),
    ],
)
def test_a_failure_is_the_exit_status_and_the_others_go_on(
    monkeypatch, run_tiny, fault, status, reason
) -> None:
    def cell(*tensors: Tensor) -> Tensor:
        if fault == "raises":
            raise RuntimeError("the launch was refused")
        if fault == "no gradient" and tensors[0].requires_grad:
            raise UnsupportedError("tk", "it has no backward", "use another backend")
        return reference.mlstm_chunkwise(*tensors) * math.nan

    patch_tk(monkeypatch, cell)
    ran = run_tiny("--backends", "tk,reference")
    failed, after = ran.rows["trainings"][2:]
    assert ran.status == 1 and (failed["status"], failed["reason"]) == (status, reason)
    assert after["status"] == "ok"


def test_text_and_trainings_follow_from_the_seed(run_tiny) -> None:
    made = text.make_text(5000, 0)
    assert len(made) == 5000 and made == text.make_text(6000, 0)[:5000] != text.make_text(5000, 1)
    windows = text.windows(made, (3, 2), 40, 1)
    assert windows.shape == (3, 2, 40) and all(bytes(row.tolist()) in made for row in windows.flatten(0, 1))
    first, again, other = (
        run_tiny("--backends", "reference", "--seed", seed).rows["trainings"][0]["losses"] for seed in "001"
    )
    assert first == again != other


def test_bad_options(run_tiny, tmp_path: Path, capsys) -> None:
    (tmp_path / "folder.png").mkdir()
    ran = run_tiny("--plot", str(tmp_path / "folder.png"))
    assert ran.status == 2 and "--plot: expected a writable file, got " in ran.err
    ran = run_tiny("--steps", "0")
    assert ran.status == 2 and "--steps: expected a positive number, got 0" in ran.err
    for backends, message in (("nonsense", "got 'nonsense'"), (",", "expected at least one")):
        with pytest.raises(SystemExit):
            main(["train", "--backends", backends])
        assert message in capsys.readouterr().err


def test_a_baseline_that_fails_is_an_error(monkeypatch, run_tiny) -> None:
    monkeypatch.setattr(tfla_tk, "mlstm_chunkwise", lambda *tensors, backend: tensors[2] * math.nan)
    ran = run_tiny("--backends", "tk")
    assert ran.status == 1 and "reference: the loss of step 0 is not finite" in ran.err


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
