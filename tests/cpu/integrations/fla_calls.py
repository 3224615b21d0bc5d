"""Calls of fla's functions by their names, and checks of fla's layers while its functions are replaced."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

SCALAR_DECAY = ["chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"]
DECODING = [name for name in integration.FUNCTIONS if name.startswith("fused_recurrent_")]
ALL = [*SCALAR_DECAY, "chunk_gla", "chunk_delta_rule", "chunk_gated_delta_rule", *DECODING]


def own(name: str) -> Callable[..., Any]:
    """fla's function by its name, as fla's module has it now."""
    function: Callable[..., Any] = getattr(importlib.import_module(integration.FUNCTIONS[name]), name)
    return function


def draw_scalar_decay(batch: int = 2, seq: int = 40, rows: int | None = None) -> dict[str, Tensor]:
    """q, k, v, g and initial_state of a call with a scalar decay."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = {"q": normal(batch, seq, 2, 16), "k": normal(batch, seq, 2, 16), "v": normal(batch, seq, 2, 32)}
    x["g"] = torch.nn.functional.logsigmoid(normal(batch, seq, 2))
    return x | {"initial_state": normal(rows or batch, 2, 16, 32)}


# fla's layers


def losses(layer: nn.Module, batch: int = 2, **options: Any) -> list[float]:
    """Of a few steps of training."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(batch, 70, 32, generator=generator) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (layer(x, **options)[0] - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        found.append(loss.item())
    return found


def assert_layer_trains_alike(
    make: Callable[[], nn.Module],
    place: tuple[str, str],
    plain_function: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    packed: bool,
) -> None:
    """That a layer trains to the same losses by the plain function and by what `accelerate` puts in place.

    Args:
        make: makes the layer, always with the same weights.
        place: the layer's module, and the name by which it calls fla's function.
    """
    options: dict[str, Any] = {"batch": 1, "cu_seqlens": torch.tensor([0, 20, 70])} if packed else {}
    module, name = place
    layer = make()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, plain_function)
        expected = losses(layer, **options)
    assert f"{module}.{name}" in integration.accelerate()
    found = losses(make(), **options)
    assert integration.last_path() == integration.Path(name, "reference", "the tensors are on a CPU")
    assert expected[-1] < 0.98 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def assert_layer_goes_on_from_a_cache(layer: nn.Module) -> None:
    """That the layer passes its state on: a prompt, a short one and single tokens are the whole."""
    cache = importlib.import_module("fla.models.utils").Cache
    x = torch.randn(2, 140, 32)
    integration.accelerate()
    layer.eval()
    with torch.no_grad():
        whole, _, _ = layer(x)
        state, lengths = cache(), [70, 64, *[1] * 6]
        parts = [layer(part, past_key_values=state, use_cache=True)[0] for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    counts = [count for function, count in integration.paths().items() if function in DECODING]
    assert counts == [{"reference": 7}]
