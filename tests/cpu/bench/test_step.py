"""`python -m tfla_tk.bench step`: one token of mLSTM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tfla_tk import mlstm_step
from tfla_tk.bench import compare, step
from tfla_tk.bench.operators import OPERATORS
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


def emulated_triton_step(*tensors: Tensor) -> Tensor:
    """The rounding of mlstm_kernels' fused step: every operation in q's dtype, sums over blocks of 64 too."""
    q, k, v, i, f, c, n, m = tensors
    log_f, m_old = torch.log(torch.sigmoid(f.float())), m.float()
    m_new = torch.maximum(log_f + m_old, i.float())
    exponents = (log_f + m_old - m_new, i - m_new, -m_new)
    decay, write, floor = (torch.exp(x).to(q.dtype) for x in exponents)
    c = decay[..., None] * c + write[..., None] * (k[..., :, None] * v[..., None, :])
    n = decay * n + write * k
    q = q * q.shape[-1] ** -0.5
    blocks = [slice(start, start + 64) for start in range(0, q.shape[-1], 64)]
    numerators = [tree_sum(q[..., x, None] * c[..., x, :].to(q.dtype), -2) for x in blocks]
    products = [tree_sum(q[..., x] * n[..., x].to(q.dtype), -1) for x in blocks]
    numerator, product = (torch.stack(x).float().sum(0) for x in (numerators, products))
    return (numerator / (torch.maximum(product.abs()[..., None], floor.float()) + 1e-6)).to(q.dtype)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


@pytest.mark.parametrize("m_dtype", [torch.bfloat16, torch.float32])
def test_the_tolerance_of_the_triton_step_covers_its_rounding(m_dtype: torch.dtype) -> None:
    """Its arithmetic in q's dtype is what is coarse: with m in fp32 it is no better."""
    shape = Shape(16, 1, 8, 256, 32)
    errors = []
    for seed in range(4):
        inputs = step.step_inputs(shape, torch.bfloat16, torch.device("cpu"), seed=seed)
        inputs["m"] = inputs["m"].to(m_dtype)
        found = emulated_triton_step(*(x.squeeze(2) for x in inputs.values())).double()
        truth = step.step_truth(**{name: x.double() for name, x in inputs.items()}, chunk_size=64).squeeze(2)
        errors.append(((found - truth).norm() / truth.norm()).item())
    own = step.OPERATOR.tolerances("bf16", baseline=True)["h"]
    assert step.OPERATOR.tolerances("bf16")["h"] < min(errors) <= max(errors) < own
    # of the other operators' Triton kernels less is allowed
    assert OPERATORS["mlstm_exp"].tolerances("bf16", baseline=True)["h"] == 1.5e-2 < own
