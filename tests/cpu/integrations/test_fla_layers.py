"""fla's layers by these kernels: they train to the same losses, and go on from a cache."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tfla_tk import reference
from tfla_tk.integrations import fla as integration

from .fla_calls import DECODING, MARKS

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")]


# What fla's layers take of fla beside its attention, GPU kernels all of them, in plain PyTorch


class Rotary(nn.Module):
    """RotaryEmbedding without a cache."""

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(q.shape[1]), frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def turned(x: Tensor) -> Tensor:
            a, b = x.split(half, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

        return turned(q), turned(k)


class NoRotary(nn.Module):
    """For layers that go on from a cache, whose tokens have other places then."""

    def forward(self, q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return q, k


class GatedNorm(nn.RMSNorm):
    """FusedRMSNormGated."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(x)
        return normed if gate is None else normed * nn.functional.silu(gate)


def norm_and_project(x: Tensor, weight: Tensor, bias: None, projection: Tensor, last: None) -> Tensor:
    """rms_norm_linear."""
    return nn.functional.linear(nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5), projection)


class Layer(NamedTuple):
    """A layer of fla.

    Attributes:
        options: beside hidden_size.
        function: of fla, that the layer calls for its attention.
    """

    module: str
    name: str
    options: dict[str, Any]
    function: str


HEADS = {"num_heads": 2}
LAYERS = {
    "gla": Layer(
        "gla",
        "GatedLinearAttention",
        HEADS | {"fuse_norm": False, "gate_logit_normalizer": 2, "gate_low_rank_dim": 8},
        "chunk_gla",
    ),
    "hgrn2": Layer("hgrn2", "HGRN2Attention", {"expand_ratio": 16}, "chunk_gla"),
    "simple_gla": Layer(
        "simple_gla",
        "SimpleGatedLinearAttention",
        HEADS | {"use_short_conv": False, "fuse_norm": False, "gate_logit_normalizer": 1},
        "chunk_simple_gla",
    ),
    "retention": Layer(
        "multiscale_retention", "MultiScaleRetention", HEADS | {"fuse_norm": False}, "chunk_retention"
    ),
    "delta": Layer("delta_net", "DeltaNet", HEADS | {"use_short_conv": False}, "chunk_delta_rule"),
    "gated": Layer(
        "gated_deltanet",
        "GatedDeltaNet",
        HEADS
        | {
            "num_v_heads": 4,
            "head_dim": 16,
            "expand_v": 1,
            "use_short_conv": False,
            "allow_neg_eigval": True,
        },
        "chunk_gated_delta_rule",
    ),
    "kda": Layer(
        "kda",
        "KimiDeltaAttention",
        HEADS | {"num_v_heads": 4, "head_dim": 16, "use_short_conv": False, "lower_bound": -5.0},
        "chunk_kda",
    ),
}


@pytest.fixture(params=LAYERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], nn.Module]:
    """Makes a small layer, always with the same weights."""
    of_fla = LAYERS[kind]
    module = pytest.importorskip(
        f"fla.layers.{of_fla.module}", reason="flash-linear-attention is not installed"
    )
    if kind == "hgrn2":
        monkeypatch.setattr(module, "swish", nn.functional.silu)
        monkeypatch.setattr(module, "rms_norm_linear", norm_and_project)

    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = getattr(module, of_fla.name)(hidden_size=32, **of_fla.options)
        layer.layer_idx = 0
        if kind in ("delta", "gated", "kda"):
            layer.o_norm = GatedNorm(layer.head_v_dim, eps=1e-5)
        elif kind != "hgrn2":
            layer.g_norm = nn.RMSNorm(layer.head_v_dim, eps=1e-5)
        if kind in ("gla", "simple_gla"):
            layer.gate_fn = nn.functional.silu
        if kind == "retention":
            layer.rotary = Rotary()
        return layer

    return make


def by_recurrence(function: str) -> Callable[..., Any]:
    """In the place of fla's function: the recurrence of the reference, of what fla's flags make of inputs."""

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        assert options.pop("initial_state") is None
        x = {name: options.pop(name) for name in ("g", "beta") if name in options}
        if options.pop("use_beta_sigmoid_in_kernel", False):
            x["beta"] = x["beta"].sigmoid() * (2 if options.pop("allow_neg_eigval") else 1)
        if options.pop("use_gate_in_kernel", False):
            raw = x["g"] + options.pop("dt_bias").view(x["g"].shape[2:])
            rate = options.pop("A_log").exp()
            if function == "chunk_kda":
                x["g"] = options.pop("lower_bound") * torch.sigmoid(rate[:, None] * raw)
            else:
                x["g"] = -rate * nn.functional.softplus(raw)
        if options.pop("use_qk_l2norm_in_kernel", False):
            q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        if function == "chunk_retention":
            x["g"] = torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2]))).expand(q.shape[:3])
        family = "simple_gla" if function == "chunk_retention" else function.removeprefix("chunk_")
        cu_seqlens, _ = options.pop("cu_seqlens", None), options.pop("state_v_first", None)
        assert not options.pop("safe_gate", None)
        assert not options.pop("output_final_state", None) and not options, options
        found: tuple[Tensor, None] = getattr(reference, f"{family}_recurrent")(
            q, k, v, **x, cu_seqlens=cu_seqlens
        )
        return found

    return run


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


@pytest.mark.parametrize("packed", [False, True])
def test_layers_train_to_the_same_loss(
    kind: str, packed: bool, make_layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch": 1, "cu_seqlens": torch.tensor([0, 20, 70])} if packed else {}
    layer, name, module = make_layer(), LAYERS[kind].function, f"fla.layers.{LAYERS[kind].module}"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, by_recurrence(name))
        expected = losses(layer, **options)
    assert f"{module}.{name}" in integration.accelerate()
    found = losses(make_layer(), **options)
    assert integration.last_path() == integration.Path(name, "reference", "the tensors are on a CPU")
    assert expected[-1] < 0.98 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_go_on_from_a_cache(kind: str, make_layer: Callable[[], nn.Module]) -> None:
    """A prompt, a short one and single tokens are the whole."""
    layer, cache = make_layer().eval(), importlib.import_module("fla.models.utils").Cache
    if kind == "retention":
        layer.rotary = NoRotary()
    x = torch.randn(2, 140, 32)
    integration.accelerate()
    with torch.no_grad():
        whole, _, _ = layer(x)
        state, lengths = cache(), [70, 64, *[1] * 6]
        parts = [layer(part, past_key_values=state, use_cache=True)[0] for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    counts = [count for function, count in integration.paths().items() if function in DECODING]
    assert counts == [{"reference": 7}]
