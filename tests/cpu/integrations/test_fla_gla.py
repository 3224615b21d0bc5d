"""fla's layers of gated linear attention by these kernels: GLA and HGRN2."""

from __future__ import annotations

import itertools
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

MODULES = {"gla": "fla.layers.gla", "hgrn2": "fla.layers.hgrn2"}


def norm_and_project(x: Tensor, weight: Tensor, bias: None, projection: Tensor, last: None) -> Tensor:
    """What fla's rms_norm_linear computes, in PyTorch."""
    return nn.functional.linear(nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5), projection)


def make_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A small layer of fla; its normalisation and activations, GPU kernels, in PyTorch."""
    torch.manual_seed(0)
    module = pytest.importorskip(MODULES[kind], reason="flash-linear-attention is not installed")
    if kind == "gla":
        layer = module.GatedLinearAttention(
            hidden_size=32, num_heads=2, fuse_norm=False, gate_logit_normalizer=2, gate_low_rank_dim=8
        )
        layer.gate_fn = nn.functional.silu
        layer.g_norm = nn.RMSNorm(layer.head_v_dim, eps=1e-5)
    else:
        layer = module.HGRN2Attention(hidden_size=32, expand_ratio=16)
        monkeypatch.setattr(module, "swish", nn.functional.silu)
        monkeypatch.setattr(module, "rms_norm_linear", norm_and_project)
    layer.layer_idx = 0
    return layer


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The recurrence in so many words, for tensors [B, T, H, D]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    rows = []
    for t in range(q.shape[1]):
        state = g[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=1)


def plain_function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Any = None, **options: Any) -> Any:
    """In place of fla's function in the layers' modules."""
    assert options["initial_state"] is None
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [plain(*(x[:, a:b] for x in (q, k, v, g))) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, dim=1), None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_layers_train_to_the_same_loss(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, place = partial(make_layer, kind, monkeypatch), (MODULES[kind], "chunk_gla")
    assert_layer_trains_alike(make, place, plain_function, monkeypatch, packed=packed)


@pytest.mark.parametrize("kind", MODULES)
def test_layers_go_on_from_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_layer_goes_on_from_a_cache(make_layer(kind, monkeypatch))
