"""GLA in segments, lane by lane: the states at the borders, and the gradients with their flows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .gla_states_emulation import Rounding, Walk, sum_of_segment
from .test_gla_states import Arrays, draw, expected, run


def borders_of(x: Arrays, scale: float, length: int, rounding: Rounding) -> tuple[Arrays, Arrays]:
    """S and dS at the borders between segments, by the token behind each; carry.cuh."""
    tokens = len(x["g"])
    begins = list(range(0, tokens, length))
    states, gradients = {}, {}
    state = x["initial"]
    for begin in begins[:-1]:
        rows = slice(begin, begin + length)
        own, decay = sum_of_segment(True, 1.0, x["k"][rows], x["g"][rows], x["v"][rows], rounding)
        state = states[begin + length] = decay[:, None] * state + own
    gradient = x["d_last"]
    for begin in reversed(begins[1:]):
        rows = slice(begin, begin + length)
        own, decay = sum_of_segment(False, scale, x["q"][rows], x["g"][rows], x["do"][rows], rounding)
        gradient = gradients[begin] = decay[:, None] * gradient + own
    return states, gradients


def run_in_segments(x: Arrays, scale: float, length: int, rounding: Rounding) -> dict[str, np.ndarray]:
    """dq, dk, dg and the gradient of the initial state."""
    states, gradients = borders_of(x, scale, length, rounding)
    tokens = len(x["g"])
    found = {name: np.full_like(x["g"], np.nan) for name in ("dq", "dk", "dg")}
    for begin in range(0, tokens, length):
        end = min(begin + length, tokens)
        rows = slice(begin, end)
        operands = tuple(x[name][rows] for name in ("q", "k", "g", "v", "do"))
        empty = np.full_like(operands[2], np.nan)
        entering = x["initial"] if begin == 0 else states[begin]
        left = Walk(True, scale, False, entering, empty.copy(), empty.copy(), {}, rounding=rounding)
        left.run(*operands)
        gradient = x["d_last"] if end == tokens else gradients[end]
        flow = ((left.state if end == tokens else states[end]) * rounding.of_both(gradient)).sum(1)
        right = Walk(False, scale, False, gradient, empty.copy(), left.sums, left.anchors, flow, rounding)
        right.run(*operands)
        for name, result in (("dq", left.result), ("dk", right.result), ("dg", right.sums)):
            found[name][rows] = result
        if begin == 0:
            found["d_initial"] = right.state
    return found


@pytest.mark.parametrize(("tokens", "length"), [(128, 64), (200, 64), (700, 128), (1300, 576)])
@pytest.mark.parametrize("gates", ["usual", "half closed", "mixed"])
def test_gradients(gates: str, tokens: int, length: int) -> None:
    """Exact; also where anchors and borders do not meet."""
    x = draw("usual" if gates == "mixed" else gates, tokens, torch.bfloat16)
    if gates == "mixed":
        kind = np.random.default_rng(1).random(x["g"].shape)
        x["g"][kind < 0.02], x["g"][kind > 0.9], x["g"][length - 1 : length + 1, 3] = -1e3, 0.0, -np.inf
    found = run_in_segments(x, 0.3, length, Rounding())
    grads, d_initial = expected(x, 0.3)
    for name, grad in grads.items():
        np.testing.assert_allclose(found[name], grad, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found["d_initial"], d_initial, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gates", ["usual", "half closed"])
def test_borders_add_no_error(gates: str, dtype: torch.dtype) -> None:
    """Flows over borders are as exact as those within a segment, and more so than those over anchors."""
    x, rounding = draw(gates, 500, dtype), Rounding(dtype)
    grads, _ = expected(x, 0.125)
    left, right = run(x, 0.125, rounding=rounding)
    whole = {"dq": left.result, "dk": right.result, "dg": right.sums}
    found = run_in_segments(x, 0.125, 128, rounding)
    for name, grad in grads.items():
        errors = [np.linalg.norm(of[name] - grad) / np.linalg.norm(grad) for of in (found, whole)]
        assert errors[0] <= 1.3 * errors[1], (name, errors)


@pytest.mark.parametrize("gates", ["closed", "-1e3", "-50"])
def test_nothing_is_left_of_dg_behind_closed_gates(gates: str) -> None:
    x = draw(gates, 200, torch.bfloat16)
    assert not run_in_segments(x, 0.125, 64, Rounding(torch.bfloat16))["dg"].any()
