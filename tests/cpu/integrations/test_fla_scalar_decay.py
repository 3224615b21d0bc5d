"""fla's layers with a scalar decay by these kernels: simple GLA and retention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .fla_calls import assert_layer_goes_on_from_a_cache, assert_layer_trains_alike

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
]


class Rotary(nn.Module):
    """What fla's RotaryEmbedding computes without a cache, in plain PyTorch."""

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(q.shape[1]), frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def turned(x: Tensor) -> Tensor:
            a, b = x.split(half, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        return turned(q), turned(k)


def make_layer(kind: str) -> nn.Module:
    """A small layer of fla; its normalisation, output gate and rotary embedding, GPU kernels, in PyTorch."""
    torch.manual_seed(0)
    if kind == "simple_gla":
        module = pytest.importorskip(
            "fla.layers.simple_gla", reason="flash-linear-attention is not installed"
        )
        layer = module.SimpleGatedLinearAttention(
            hidden_size=32, num_heads=2, use_short_conv=False, fuse_norm=False, gate_logit_normalizer=1
        )
        layer.gate_fn = nn.functional.silu
    else:
        module = pytest.importorskip(
            "fla.layers.multiscale_retention", reason="flash-linear-attention is not installed"
        )
        layer = module.MultiScaleRetention(hidden_size=32, num_heads=2, fuse_norm=False)
        layer.rotary = Rotary()
    layer.g_norm = nn.RMSNorm(layer.head_v_dim, eps=1e-5)
    return layer


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence in so many words, for tensors [B, T, H, D] and g [B, T, H]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1), state


def plain_function(kind: str) -> Callable[..., Any]:
    """In place of fla's function in the layer's module."""

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if kind == "retention":
            decay = torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2])))
            g = decay.expand(q.shape[:3])
        assert g is not None
        if initial_state is not None and state_v_first:
            initial_state = initial_state.mT
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        parts = [
            plain(*(x[:, a:b] for x in (q, k, v, g)), initial_state) for a, b in itertools.pairwise(bounds)
        ]
        o = torch.cat([part[0] for part in parts], dim=1)
        last = torch.cat([part[1] for part in parts])
        if not output_final_state:
            return o, None
        return o, last.mT if state_v_first else last

    return function


LAYERS = {
    "simple_gla": ("fla.layers.simple_gla", "chunk_simple_gla"),
    "retention": ("fla.layers.multiscale_retention", "chunk_retention"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_train_to_the_same_loss(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(make_layer, kind)
    assert_layer_trains_alike(make, LAYERS[kind], plain_function(kind), monkeypatch, packed=packed)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_go_on_from_a_cache(kind: str) -> None:
    layer = make_layer(kind)
    if kind == "retention":
        layer.rotary = nn.Module()
        layer.rotary.forward = lambda q, k, **options: (q, k)  # type: ignore[method-assign]
    layer.layer_idx = 0
    assert_layer_goes_on_from_a_cache(layer)
