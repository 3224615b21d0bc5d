"""fla's layers on the GPU: these kernels in the place of fla's functions train them to the same loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tfla_tk
from tfla_tk.bench import fla
from tfla_tk.integrations import fla as integration

# fla's module, the function that the layer calls, options of the layer, and a learning rate for its training
LAYERS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "SimpleGatedLinearAttention": ("simple_gla", "chunk_simple_gla", {}, 0.5),
    "MultiScaleRetention": ("multiscale_retention", "chunk_retention", {}, 0.5),
    "DeltaNet": ("delta_net", "chunk_delta_rule", {}, 0.5),
    "GatedDeltaNet": ("gated_deltanet", "chunk_gated_delta_rule", {"head_dim": 64}, 0.5),
    "KimiDeltaAttention": ("kda", "chunk_kda", {"head_dim": 64}, 0.5),
    "GatedLinearAttention": ("gla", "chunk_gla", {}, 8.0),
    "HGRN2Attention": ("hgrn2", "chunk_gla", {}, 8.0),
}
OF_LOSSES = 2e-3  # that are to be the same, relative


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    # not for the module: where there is no GPU nothing needs this import, which takes seconds
    pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")
    integration.restore()
    yield
    integration.restore()


def losses(name: str, **options: Any) -> list[float]:
    """Of a few steps of training a layer in bf16, from the same start."""
    torch.manual_seed(0)
    module, _, of_layer, rate = LAYERS[name]
    layer_class = getattr(importlib.import_module(f"fla.layers.{module}"), name)
    layer = layer_class(hidden_size=256, num_heads=2, **of_layer)
    layer = layer.to("cuda", torch.bfloat16)
    x, target = (torch.randn(1, 512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (layer(x, **options)[0].float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_to_the_same_loss(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, *_ = LAYERS[name]
    offsets = torch.tensor([0, 100, 101, 512], device="cuda")
    options = {"cu_seqlens": offsets} if packed else {}
    with fla.lifted_guard(function) as lifted:
        expected = losses(name, **options)
    integration.accelerate()
    found = losses(name, **options)
    assert integration.last_path() == integration.Path(function, "tk")
    assert found[-1] < found[0]
    if lifted:  # fla's gradients may be wrong with this Triton: the reference tells
        reference = partial(getattr(tfla_tk, function), backend="reference")
        monkeypatch.setattr(f"fla.layers.{module}.{function}", reference)
        truth = losses(name, **options)
        assert found == pytest.approx(truth, rel=OF_LOSSES)
        if expected != pytest.approx(truth, rel=OF_LOSSES):
            pytest.skip("fla refuses its gated backward with this Triton, and is right to")
    assert found == pytest.approx(expected, rel=OF_LOSSES)


def test_what_tk_cannot_serve_goes_to_fla() -> None:
    """In fp32, with the reason; the result is fla's own."""
    q, k, v = (torch.randn(1, 100, 2, 64, device="cuda") for _ in range(3))
    function = importlib.import_module("fla.ops.retention").chunk_retention
    expected, _ = function(q, k, v)
    integration.accelerate()
    found, _ = importlib.import_module("fla.ops.retention").chunk_retention(q, k, v)
    path = integration.last_path()
    assert path is not None and path.backend == "fla" and "torch.float32" in path.reason
    assert torch.equal(found, expected)
