"""fla's layers of gated linear attention by these kernels: GLA and HGRN2."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import gla
from tfla_tk.integrations import fla as integration

pytest.importorskip("fla.ops", reason="fla-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")

MODULES = {"gla": "fla.layers.gla", "hgrn2": "fla.layers.hgrn2"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """fla as it was, before and after."""
    integration.restore()
    gla._path.plans.clear()
    yield
    integration.restore()
    gla._path.plans.clear()


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


def losses(layer: nn.Module, batch: int = 2, **options: Any) -> list[float]:
    """Of a few steps of training."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(batch, 70, 32, generator=generator) for _ in range(2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (layer(x, **options)[0] - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())
        optimizer.step()
        found.append(loss.item())
    return found


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
    options: dict[str, Any] = {"batch": 1, "cu_seqlens": torch.tensor([0, 20, 70])} if packed else {}
    layer = make_layer(kind, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[MODULES[kind]], "chunk_gla", plain_function)
        expected = losses(layer, **options)
    assert f"{MODULES[kind]}.chunk_gla" in integration.accelerate()
    found = losses(make_layer(kind, monkeypatch), **options)
    assert integration.last_path() == integration.Path("chunk_gla", "reference", "the tensors are on a CPU")
    assert expected[-1] < 0.99 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODULES)
def test_layers_go_on_from_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache the layer passes the state on: two halves are the whole."""
    layer = make_layer(kind, monkeypatch)
    cache = importlib.import_module("fla.models.utils").Cache
    x = torch.randn(2, 140, 32)
    integration.accelerate()
    whole, _, _ = layer(x)
    state = cache()
    halves = [layer(part, past_key_values=state, use_cache=True)[0] for part in x.split(70, dim=1)]
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-4, atol=1e-5)
