"""Calls of chunk_simple_gla that are alike but for one thing: nothing of another call may be taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_simple_gla, simple_gla

from .served import Operators
from .simple_gla_calls import Kernels, draw

Change = Callable[[dict[str, Any]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "other memory": lambda x: {n: t.clone() for n, t in x.items()},
    "scale": lambda x: x | {"scale": 0.5},
    "g_gamma": lambda x: without(x, "g") | {"g_gamma": torch.tensor([-0.5, -0.1, 0.0, -2.0])},
    "g_gamma in fp64": lambda x: (
        without(x, "g") | {"g_gamma": torch.tensor([-0.5, -0.1, 0.0, -2.0], dtype=torch.float64)}
    ),
    "no gate": lambda x: without(x, "g"),
    "gate in bf16": lambda x: x | {"g": x["g"].bfloat16()},
    "gate in fp64": lambda x: x | {"g": x["g"].double()},
    "no state": lambda x: without(x, "initial_state"),
    "state in bf16": lambda x: x | {"initial_state": x["initial_state"].bfloat16()},
    "state with V first": lambda x: (
        x | {"initial_state": x["initial_state"].mT.contiguous(), "state_v_first": True}
    ),
    "heads": lambda x: x | {n: x[n][:, :, :1] for n in "qk"},
    "strides": lambda x: x | {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"},
    "strides of g": lambda x: x | {"g": x["g"].mT.contiguous().mT},
    "length": lambda x: x | {n: x[n][:, 1:] for n in ("q", "k", "v", "g")},
    "packed": lambda x: (
        {n: t.flatten(0, 1)[None] for n, t in x.items() if n != "initial_state"}
        | {"initial_state": x["initial_state"], "cu_seqlens": torch.tensor([0, 30, 80])}
    ),
}


def without(x: dict[str, Any], name: str) -> dict[str, Any]:
    return {n: t for n, t in x.items() if n != name}


def train(x: dict[str, Any], function: Callable[..., Any], *, last: bool) -> list[Tensor]:
    """Results, and gradients of all that has them."""
    inputs = {
        n: t.detach().requires_grad_() for n, t in x.items() if n in ("q", "k", "v", "g", "initial_state")
    }
    found = function(**x | inputs, output_final_state=last)
    outputs = [o for o in found if o is not None]
    loss = sum(o.float().square().sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(loss, list(inputs.values()))]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_another_call_is_taken(name: str, last: bool, kernels: Kernels) -> None:
    """With and without gradients, between two calls that are alike; the kernels serve every one of them."""
    x = draw(dtype=torch.float32)
    other = CHANGES[name](x)
    count = 0
    for call in (x, other, x, other):
        found = chunk_simple_gla(**call, output_final_state=last, backend="tk")
        expected = chunk_simple_gla(**call, output_final_state=last, backend="reference")
        torch.testing.assert_close(found, expected)
        count += 1
        assert (len(kernels.calls), kernels.calls[-1]) == (count, "forward")
        found = train(call, partial(chunk_simple_gla, backend="tk"), last=last)
        expected = train(call, partial(chunk_simple_gla, backend="reference"), last=last)
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert (a - b).float().norm() <= (1e-4 if a.dtype == torch.float32 else 1e-2) * b.float().norm()
        count += 2
        assert kernels.calls[-2:] == ["forward, kept", "backward, kept"] and len(kernels.calls) == count


def test_requires_grad_flips(kernels: Kernels) -> None:
    """The same tensors: every combination has its own plan, and only what asks gets a gradient."""
    x = draw(dtype=torch.float32)
    for flags in 2 * [(), ("q",), ("g",), ("q", "g"), ("initial_state",)]:
        for n, t in x.items():
            t.requires_grad_(n in flags)
            t.grad = None
        o, _ = chunk_simple_gla(**x, backend="tk")
        assert o.requires_grad == bool(flags)
        if flags:
            o.square().sum().backward()
        assert {n for n, t in x.items() if t.grad is not None} == set(flags)
        with torch.no_grad():
            assert not chunk_simple_gla(**x, backend="tk")[0].requires_grad
    assert len(simple_gla._path.plans) == 5


@pytest.mark.parametrize("gate", ["token", "head", "none"])
@pytest.mark.parametrize("watched", ["backward", "saved"])
def test_a_backward_that_is_not_plain(watched: str, gate: str, kernels: Kernels) -> None:
    """The op, which wants a decay per head of every token; hooks see what the op would save."""
    x = CHANGES[{"token": "other memory", "head": "g_gamma", "none": "no gate"}[gate]](draw())
    inputs = {n: t.clone().requires_grad_(n != "g_gamma") for n, t in x.items()}
    wanted = [t for t in inputs.values() if t.requires_grad]
    o, _ = chunk_simple_gla(**inputs, backend="tk")
    expected = torch.autograd.grad(o.square().sum(), wanted)
    kernels.calls.clear()
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks if watched == "saved" else nullcontext():
        o, _ = chunk_simple_gla(**inputs, backend="tk")
    loss = o.square().sum()
    with Operators() if watched == "backward" else nullcontext():
        found = torch.autograd.grad(loss, wanted)
    if watched == "backward":
        assert kernels.calls == ["forward, kept"]
    else:
        assert kernels.calls == ["forward", "backward"]
        shapes = [t.shape for t in saved]
        assert len(shapes) == (4 if gate == "none" else 5) and shapes.count((2, 40, 4)) == (gate != "none")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
