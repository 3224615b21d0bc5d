"""Autograd sees that a state was written in place, by kernels that write by address."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

import tfla_tk
import tfla_tk.backends
from tfla_tk.core import eager
from tfla_tk.ops import mlstm_decode

from .decode_calls import draw_for

STATE = ("c", "n", "m")
FUNCTIONS = ("mlstm_step", "mlstm_siging_step", "mlstm_sequence", "mlstm_siging_sequence")


@pytest.fixture
def kernels(fake_tk: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that write the state at its address, which autograd cannot see; what was called."""
    called: list[str] = []

    def in_place(*args: Any) -> Tensor:
        called.append("step" if args[0].dim() == 3 else "sequence")
        state = args[5:8]
        results = [None if x is None else x.clone() for x in state]
        h = mlstm_decode.in_place_on_cpu(*args[:5], *results, *args[8:])
        for target, result in zip(state, results, strict=True):
            if target is not None:
                assert target.is_contiguous()
                ctypes.memmove(target.data_ptr(), result.data_ptr(), result.nbytes)
        return h

    fake_tk.verdict = tfla_tk.Support(True)
    monkeypatch.setattr(fake_tk.decoding, "in_place", in_place)
    return called


def saved_by_autograd(x: Tensor) -> Tensor:
    """A loss whose backward reads x."""
    weight = torch.ones_like(x, requires_grad=True)
    return (weight * x).sum()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("backend", ["tk", "reference"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_saved_state_that_was_overwritten(
    function: str, backend: str, inference: bool, kernels: list[str]
) -> None:
    """Every part, whatever mode the step ran in; the values are those of a step with a new state."""
    inputs = draw_for(function)
    step = getattr(tfla_tk, function)
    state = [name for name in STATE if name in inputs]
    _, expected = step(**{name: x.clone() for name, x in inputs.items()}, backend="reference")
    losses = [saved_by_autograd(inputs[name]) for name in state]
    losses += [saved_by_autograd(inputs[name][1:]) for name in state]
    with torch.inference_mode(inference):
        step(**inputs, inplace=True, backend=backend)
    assert kernels == ([] if backend == "reference" else ["step" if "step" in function else "sequence"])
    for name, value in zip(state, expected, strict=True):
        torch.testing.assert_close(inputs[name], value)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_op_counts_versions_itself(function: str) -> None:
    """Whatever its implementation writes: on the meta device it writes nothing."""
    inputs = {name: x.to("meta") for name, x in draw_for(function).items()}
    name = "mlstm_step_" if "step" in function else "mlstm_sequence_"
    sigmoid_gate = "m" not in inputs
    state = [inputs[part] for part in STATE if part in inputs]
    before = [x._version for x in state]
    inputs.setdefault("m", None)
    getattr(torch.ops.tfla_tk, name)(*inputs.values(), sigmoid_gate, True, 1e-6)
    assert all(x._version > version for x, version in zip(state, before, strict=True))


@pytest.mark.parametrize("through_the_op", [False, True])
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "siging" in name])
def test_what_is_not_written_keeps_its_version(
    function: str, through_the_op: bool, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """n without normaliser, and everything where a new state is returned."""
    if through_the_op:
        monkeypatch.setattr(eager, "KNOWS_EAGER_CALLS", False)
    inputs = draw_for(function)
    step = getattr(tfla_tk, function)
    losses = {name: saved_by_autograd(inputs[name]) for name in inputs}
    step(**inputs, normalize=False, backend="tk")
    losses["c"].backward(retain_graph=True)
    step(**inputs, normalize=False, inplace=True, backend="tk")
    for name in "qkvifn":
        losses[name].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses["c"].backward()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_state_of_inference_mode(function: str, kernels: list[str]) -> None:
    """It has no version, and needs none."""
    with torch.inference_mode():
        inputs = draw_for(function)
        before = inputs["c"].clone()
        getattr(tfla_tk, function)(**inputs, inplace=True, backend="tk")
        assert kernels and not torch.equal(inputs["c"], before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_step(function: str, backend: str, kernels: list[str]) -> None:
    torch._dynamo.reset()
    inputs = draw_for(function)
    losses = [saved_by_autograd(inputs[name]) for name in STATE if name in inputs]
    step = getattr(tfla_tk, function)
    compiled = torch.compile(
        lambda **x: step(**x, inplace=True, backend="tk")[0] + 1, backend=backend, fullgraph=True
    )
    with torch.no_grad():
        compiled(**inputs)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
