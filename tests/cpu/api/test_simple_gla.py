"""chunk_simple_gla, chunk_retention, chunk_lightning_attn: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import chunk_lightning_attn, chunk_retention, chunk_simple_gla, reference, simple_gla

from .linear import assert_same, gradients
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
def test_decays_of_heads(function: Callable[..., Any], options: dict[str, Any], decay: Tensor) -> None:
    x = draw()
    del x["g"]
    expected = gradients(reference.simple_gla_recurrent, x, g_gamma=decay.float())
    assert_same(gradients(function, x, **options), expected)


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
