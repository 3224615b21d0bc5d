"""`python -m tfla_tk.bench step`: one token of mLSTM."""

from __future__ import annotations

import pytest
import torch

from tfla_tk import mlstm_step
from tfla_tk.bench import compare, step
from tfla_tk.bench.shapes import Shape

SMALL = Shape(2, 3, 2, 16, 32)


def test_the_command(command) -> None:
    status, rows, out, _ = command("step", "--commit", "abc", "--shapes", "2x3x2x16x32,1x1x4x16x16")
    assert status == 0
    found = [(row["op"], row["backend"], row["shape"]["T"], row["commit"]) for row in rows]
    assert found == [("mlstm_step", "reference", 3, "abc"), ("mlstm_step", "reference", 1, "abc")]
    assert max(row["rel_err"]["h"] for row in rows) < 1e-5
    assert "mLSTM, one step, forward, B2 T3 H2 16/32" in out


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
    torch.testing.assert_close(step.step_truth(**inputs, chunk_size=64), expected)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("1x4x2x16x16xN2", "--shapes: expected no N, a step has one token, got 2"),
        ("1x4x2x16x16xHV4", "shape HV: expected 2"),
    ],
)
def test_shapes_that_a_step_does_not_have_are_wrong_usage(monkeypatch, command, shape, message) -> None:
    monkeypatch.setattr(compare, "run_contest", pytest.fail)
    ran = command("step", "--shapes", shape)
    assert ran.status == 2 and message in ran.err
