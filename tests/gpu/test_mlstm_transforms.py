"""What autograd, torch.func and the FLOP counter see of the kernels themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import tfla_tk
from tfla_tk import UnsupportedError
from tfla_tk.bench.shapes import Shape, cost

from .memory import TOKENS, normal
from .mlstm import assert_gradients, draw_packed, make_inputs

DECODING = ("mlstm_step", "mlstm_siging_step", "mlstm_sequence", "mlstm_siging_sequence")


def draw(function: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The arguments of a step, or of three tokens, at 64/128; states of the dtype."""
    tokens, gates = ((), (1,)) if "step" in function else ((3,), (3,))
    shapes = {"q": (*tokens, 64), "k": (*tokens, 64), "v": (*tokens, 128), "i": gates, "f": gates}
    shapes |= {"c": (64, 128), "n": (64,)} | ({} if "siging" in function else {"m": (1,)})
    dtypes = dict.fromkeys("qkv", torch.bfloat16) | dict.fromkeys("cnm", dtype)
    return {name: normal(2, 3, *size, seed=ord(name)).to(dtypes.get(name, torch.float32))
            for name, size in shapes.items()}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", DECODING)
def test_a_saved_state_that_was_overwritten(function: str, dtype: torch.dtype, compiled: bool) -> None:
    """By a kernel, at its address: autograd refuses the backward that would read it."""
    torch._dynamo.reset()
    inputs = draw(function, dtype)
    state = [inputs[name] for name in "cnm" if name in inputs]
    before = [x.clone() for x in state]
    losses = [(torch.ones_like(x, requires_grad=True) * x).sum() for x in state]

    def step(**x: Tensor) -> Any:
        return getattr(tfla_tk, function)(**x, inplace=True, backend="tk")[0]

    with torch.no_grad():
        (torch.compile(step, fullgraph=True) if compiled else step)(**inputs)
    assert not any(torch.equal(x, old) for x, old in zip(state, before, strict=True))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_per_sample(operator: Any) -> None:
    """vmap of grad is one call with a larger batch: for every sample the gradients of a call of its own."""
    x = make_inputs(4, 3, 130)
    dh = operator.draw_cotangents(x, last=False)["h"]

    def loss(sample: dict[str, Tensor], dh: Tensor) -> Tensor:
        h = operator({name: t[None] for name, t in sample.items()})
        return (h[0].float() * dh.float()).sum()

    found = vmap(grad(loss))(x, dh)
    expected = operator.gradients(x, {"h": dh})
    assert all((found[name].shape, found[name].dtype) == (t.shape, t.dtype) for name, t in expected.items())
    assert_gradients(found, expected, x["q"].dtype)


def test_vmap_over_packed_sequences(operator: Any) -> None:
    """All with the same offsets."""
    x = draw_packed(operator, [70, 0, 65], (64, 128))
    fixed = {name: t for name, t in x.items() if name not in TOKENS}
    batch = [{name: x[name] * scale for name in TOKENS} for scale in (1, 0.5)]
    stacked = {name: torch.stack([sample[name] for sample in batch]) for name in TOKENS}
    found = vmap(lambda tokens: operator(tokens | fixed))(stacked)
    for h, sample in zip(found, batch, strict=True):
        torch.testing.assert_close(h, operator(sample | fixed), rtol=1e-2, atol=1e-2)


def test_forward_mode(operator: Any) -> None:
    """Refused by name; under auto the reference's tangent."""
    x = make_inputs(1, 2, 70, (64, 64))

    def tangent(backend: str) -> Tensor:
        found: Tensor = jvp(lambda q: operator(x | {"q": q}, backend), (x["q"],), (x["k"],))[1]
        return found

    operator(x)
    with pytest.raises(UnsupportedError, match="backend='reference'"):
        tangent("tk")
    found = tangent("auto")
    assert found.abs().sum() > 0 and torch.equal(found, tangent("reference"))


@pytest.mark.parametrize("compiled", [False, True])
def test_flops(operator: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    leaves = {name: t.requires_grad_() for name, t in make_inputs(2, 3, 130, (64, 128)).items()}
    run = torch.compile(operator) if compiled else operator
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            run(leaves).sum().backward()
        assert counter.get_total_flops() == cost("mlstm_exp", Shape(2, 130, 3, 64, 128), "fwdbwd").flops
        run(leaves).sum().backward()
