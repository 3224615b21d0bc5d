from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfla_tk import doctor, mlstm_step
from tfla_tk.backends import triton
from tfla_tk.bench import compare, results, step
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.shapes import Shape, cost
from tfla_tk.errors import UnsupportedError

from .test_ablation import REPORT

SMALL = Shape(2, 3, 2, 16, 32)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "report", lambda: REPORT)


def test_command(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.json"
    assert main(["step", "--json", str(path), "--commit", "abc", "--shapes", "2x3x2x16x32,1x1x4x16x16"]) == 0
    rows = results.load(path)
    assert [(row["op"], row["backend"], row["shape"]["T"]) for row in rows] == [
        ("mlstm_step", "reference", 3),
        ("mlstm_step", "reference", 1),
    ]
    assert max(row["rel_err"]["h"] for row in rows) < 1e-5
    assert "mLSTM, one step, forward, B2 T3 H2 16/32" in capsys.readouterr().out


def test_bytes_are_the_state_twice() -> None:
    shape = Shape(64, 1, 8, 256, 512)
    for itemsize in (2, 4):
        state = 512 * 256 * 512 * itemsize
        assert 2 * state < cost("mlstm_step", shape, "fwd", itemsize).bytes < 2.02 * state


def test_every_step_has_a_state_of_its_own_in_one_piece() -> None:
    inputs = step.step_inputs(SMALL, torch.bfloat16, torch.device("cpu"))
    assert inputs["c"].shape == (2, 2, 3, 16, 32) and inputs["c"].dtype == torch.bfloat16
    assert inputs["i"].dtype == torch.float32 and inputs["m"].shape == (2, 2, 3, 1)
    for x in inputs.values():
        assert all(part.is_contiguous() for part in x.unbind(2))


def test_in_place_starts_from_the_given_state_and_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees the first call, which is right; later calls go on."""
    monkeypatch.setattr(step, "mlstm_step", lambda *x, backend, **options: mlstm_step(*x, **options))
    inputs = step.step_inputs(SMALL, torch.float32, torch.device("cpu"))
    before = inputs["c"].clone()
    expected = step.OPERATOR.call("reference", *inputs.values())
    found = [step.OPERATOR.call(step.IN_PLACE, *inputs.values()) for _ in range(2)]
    assert torch.equal(found[0], expected) and not torch.equal(found[1], expected)
    assert torch.equal(inputs["c"], before)
    torch.testing.assert_close(step.step_truth(*inputs.values(), chunk_size=64), expected)


def test_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [[v.call for v in contest.variants] for contest in step.contests((SMALL,))] == [["reference"]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (contest,) = step.contests((SMALL,))
    assert [v.call for v in contest.variants] == ["tk", "tk:in_place", "triton", "reference"]
    assert {v.family for v in contest.variants} == {"tk", "triton", "reference"}
    assert isinstance(contest, compare.Contest)


def test_without_mlstm_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = triton.Support(False, "mlstm-kernels is not installed", "install it")
    monkeypatch.setattr(triton, "MLSTM_KERNELS_MISSING", missing)
    inputs = step.step_inputs(SMALL, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="not installed"):
        step.OPERATOR.call("triton", *inputs.values())
