"""`python -m tfla_tk.bench step --op ..`: one token of the linear operators."""

from __future__ import annotations

import pytest
import torch

from tfla_tk.bench import inputs, linear_step
from tfla_tk.bench.results import V_FIRST
from tfla_tk.bench.shapes import Shape

of_every_op = pytest.mark.parametrize("op", linear_step.OPERATORS)


def small(op: str) -> Shape:
    return Shape(2, 3, 2, 16, 32, HV=4 if op in ("gated_delta_rule", "kda") else None)


def test_the_command(command) -> None:
    status, rows, out, _ = command("step", "--op", "gla,delta_rule", "--commit", "abc")
    assert status == 0
    assert [(row["op"], row["backend"]) for row in rows] == [
        ("gla_step", "reference"),
        ("delta_rule_step", "reference"),
    ]
    assert max(row["rel_err"]["o"] for row in rows) < 1e-5
    assert "GLA, one step, forward, B2 T3 H2 16/32" in out


@of_every_op
def test_every_step_is_that_of_its_own_state(op: str) -> None:
    """With states of both layouts; the inputs of a step lie in one piece."""
    operator, shape = linear_step.OPERATORS[op], small(op)
    tensors = operator.inputs(shape, torch.float64, torch.device("cpu"), "bnsd", 0, 0.0)
    assert all(part.is_contiguous() for x in tensors.values() for part in x.unbind(2))
    expected = operator.truth(**tensors, chunk_size=64, **operator.options)
    assert expected.shape == (2, shape.value_heads, 3, 32)
    torch.testing.assert_close(operator.call("reference", *tensors.values()), expected)
    last = {name: x[:, :, 2:] for name, x in tensors.items()}
    torch.testing.assert_close(operator.call("reference", *last.values()), expected[:, :, 2:])
    if op != "delta_rule":
        found = operator.call(f"reference{V_FIRST}", *tensors.values())
        torch.testing.assert_close(found, expected)
    inputs.forget()
