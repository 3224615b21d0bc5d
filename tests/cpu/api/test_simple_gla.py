"""chunk_simple_gla, chunk_retention, chunk_lightning_attn: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_lightning_attn, chunk_retention, chunk_simple_gla, reference, simple_gla

from .linear import assert_same, gradients, heads_first
from .served import Operators
from .simple_gla_calls import Kernels, draw

SLOPES = {"g_gamma": -torch.tensor([0.5, 0.25, 0.125, 0.0625])}


@pytest.mark.parametrize(
    ("function", "options", "decay"),
    [
        (chunk_retention, {}, reference.retention_log_decay(4, dtype=torch.float32)),
        (chunk_lightning_attn, {"layer_idx": 3, "num_layers": 12}, reference.lightning_log_decay(4, 3, 12)),
        (chunk_lightning_attn, {"layer_idx": 0, "num_layers": 1}, reference.lightning_log_decay(4, 0, 1)),
        (chunk_lightning_attn, SLOPES, SLOPES["g_gamma"]),
    ],
)
def test_decays_of_heads(
    function: Callable[..., Any], options: dict[str, Any], decay: Tensor, kernels: Kernels
) -> None:
    x = draw()
    del x["g"]
    expected = gradients(reference.simple_gla_recurrent, x, g_gamma=decay.float())
    for backend in ("reference", "reference:recurrent", "reference:parallel", "tk"):
        assert_same(gradients(function, heads_first(x), **options, backend=backend), expected)


def test_decays_are_kept_but_not_in_a_trace() -> None:
    x = draw(dtype=torch.float32)
    simple_gla._decays.clear()
    compiled = torch.compile(chunk_retention, backend="eager", fullgraph=True)
    compiled(x["q"], x["k"], x["v"], backend="reference")
    assert not simple_gla._decays
    with torch.inference_mode():
        chunk_retention(x["q"], x["k"], x["v"])
    (decay,) = simple_gla._decays.values()
    assert not decay.is_inference()
    chunk_retention(*(x[n].clone().requires_grad_() for n in "qkv"))[0].sum().backward()
    assert list(simple_gla._decays.values()) == [decay]


@pytest.mark.parametrize("heads", [(0, 0), (2, 2)])
def test_no_head_and_no_batch(heads: tuple[int, int]) -> None:
    drawn = draw(batch=1 if heads[0] == 0 else 0, heads=heads)
    x = [drawn[name] for name in ("q", "k", "v")]
    for o, final in (
        chunk_retention(*x, output_final_state=True),
        chunk_lightning_attn(*x, 1, 3, output_final_state=True),
    ):
        assert o.shape == x[2].shape and final.shape == drawn["initial_state"].shape


def test_positive_decay_is_computed_as_given() -> None:
    x = draw(seq=20)
    x["g"] = x["g"].neg()
    expected = gradients(reference.simple_gla_recurrent, x)
    assert_same(gradients(chunk_simple_gla, x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gates_in_fp64_do_not_change_dtypes(dtype: torch.dtype) -> None:
    x = {name: t.to(dtype if name in "qkv" else torch.float32) for name, t in draw().items()}
    o, last = chunk_simple_gla(x["q"], x["k"], x["v"], x["g"].double(), output_final_state=True)
    assert (o.dtype, last.dtype) == (dtype, torch.float32)


def test_options_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    x = draw()
    options = {"scale": numpy.float64(0.5), "output_final_state": numpy.bool_(True)}
    options["chunk_size"] = numpy.int64(16)
    o, last = chunk_simple_gla(**x, **options)
    expected, expected_last = chunk_simple_gla(**x, scale=0.5, output_final_state=True, chunk_size=16)
    assert torch.equal(o, expected) and torch.equal(last, expected_last)


def test_a_decay_per_head_comes_with_strides_of_zero(kernels: Kernels) -> None:
    x = draw(dtype=torch.float32)
    chunk_retention(x["q"], x["k"], x["v"])
    g = kernels.tensors[3]
    assert g.shape == (2, 40, 4) and g.stride()[:2] == (0, 0) and g.dtype == torch.float32
    chunk_simple_gla(x["q"], x["k"], x["v"])
    assert kernels.tensors[3] is None
    chunk_retention(x["q"].requires_grad_(), x["k"], x["v"])[0].sum().backward()
    assert kernels.needs_gates == [False]


# Calls with and without gradients


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
    x = draw()
    if gate != "token":
        del x["g"]
    if gate == "head":
        x["g_gamma"] = torch.tensor([-0.5, -0.1, 0.0, -2.0])
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
