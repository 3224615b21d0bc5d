"""Models of Hugging Face and of fla generate: `accelerate` serves every step, on a CPU by the reference."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.bench.generate import take_cache
from tfla_tk.integrations import fla as integration

from .fla_calls import DECODING, MARKS
from .test_fla_layers import GatedNorm, NoRotary, norm_and_project
from .test_fla_transformers import KDA, MODELS, draw_tokens, its_own_loop, make_model

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:ShortConvolution is crucial"),
    pytest.mark.filterwarnings("ignore:.*past_key_values"),
]

NEW = 5


def generated(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.generate(
            tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options
        )
    return found


def prompt(model: Any, length: int, *, padded: bool = False, beams: int = 1) -> dict[str, Any]:
    """Arguments of `generated`; the first of two prompts may be a third shorter, with padding before it."""
    tokens = draw_tokens(model, length)
    if padded:
        tokens[0, : length // 3] = 0
    return {"tokens": tokens, "attention_mask": (tokens != 0).long(), "num_beams": beams}


@pytest.mark.parametrize(
    ("kind", "length"), [(kind, n) for kind in (*MODELS, KDA) for n in (1, 64)] + [(MODELS[0], 65)]
)
def test_models_of_hugging_face_generate(kind: str, length: int) -> None:
    """The tokens of the loop without a cache, by Hugging Face's own loops in torch."""
    model, module = make_model(kind, initializer_range=0.3)
    model.eval()
    tokens = draw_tokens(model, length)
    with its_own_loop(module):
        expected = generated(model, tokens, use_cache=False)
    integration.accelerate()
    assert torch.equal(generated(model, tokens), expected)
    layers = sum("A_log" in name for name, _ in model.named_parameters())
    steps = {"reference": layers * (NEW - 1)}
    rule = "kda" if kind == KDA else "gated_delta_rule"
    assert integration.paths() == {f"chunk_{rule}": {"reference": layers}, f"fused_recurrent_{rule}": steps}


@pytest.mark.parametrize(
    ("kind", "length", "padded", "beams"),
    [("qwen3_next", 30, True, 3), ("qwen3_5", 100, True, 1), ("olmo_hybrid", 40, False, 3)],
)
def test_beams_and_left_padding_of_hugging_face(kind: str, length: int, padded: bool, beams: int) -> None:
    model, module = make_model(kind, initializer_range=0.3)
    model.eval()
    given = prompt(model, length, padded=padded, beams=beams)
    with its_own_loop(module):
        expected = generated(model, use_cache=False, **given)
    integration.accelerate()
    assert torch.equal(generated(model, **given), expected)


# fla's own models

OF_FLA = {
    "GLA": {"num_heads": 2, "gate_low_rank_dim": 8},
    "HGRN2": {"expand_ratio": 16},
    "DeltaNet": {"num_heads": 2, "use_short_conv": False},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 16, "expand_v": 1, "use_short_conv": False},
    "RetNet": {"num_heads": 2},
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "hidden_ratio": 2, "vocab_size": 64}
SIZES |= {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
SIZES |= {"initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def make_fla_model(name: str, **sizes: Any) -> nn.Module:
    """Of its own configuration."""
    models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(**sizes)
    return take_cache(getattr(models, f"{name}ForCausalLM")(config).eval())


def make_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A small one; what it takes of fla beside its attention is plain PyTorch. It sees no positions."""
    model = make_fla_model(name, **SIZES, **OF_FLA[name])
    monkeypatch.setattr(importlib.import_module("fla.modules.mlp"), "swiglu", silu_times)
    hgrn2 = importlib.import_module("fla.layers.hgrn2")
    monkeypatch.setattr(hgrn2, "swish", nn.functional.silu)
    monkeypatch.setattr(hgrn2, "rms_norm_linear", norm_and_project)
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            kind = type(child).__name__
            if type(module).__name__ == "HGRN2Attention":
                pass  # which takes the parameters of its norm alone
            elif kind in ("RMSNorm", "FusedRMSNormGated") and type(child) is not nn.RMSNorm:
                setattr(module, child_name, GatedNorm(child.weight.shape[0], eps=1e-5))
            elif kind == "RotaryEmbedding":
                setattr(module, child_name, NoRotary())
        if hasattr(module, "gate_fn"):
            module.gate_fn = nn.SiLU()
    return model


def silu_times(x: Tensor, y: Tensor) -> Tensor:
    """swiglu."""
    return nn.functional.silu(x) * y


@pytest.mark.parametrize(
    ("name", "length", "padded", "beams"),
    [
        ("GLA", 1, False, 1),
        ("GLA", 65, True, 1),
        ("HGRN2", 40, True, 3),
        ("HGRN2", 100, False, 1),
        ("DeltaNet", 64, False, 3),
        ("DeltaNet", 100, True, 1),
        ("GatedDeltaNet", 40, False, 1),
        ("GatedDeltaNet", 65, True, 3),
        ("RetNet", 64, True, 1),
        ("RetNet", 100, False, 3),
    ],
)
def test_models_of_fla_generate(
    name: str, length: int, padded: bool, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the loop without a cache; prompts of more than 64 tokens are computed chunkwise."""
    model = make_on_a_cpu(name, monkeypatch)
    given = prompt(model, length, padded=padded, beams=beams)
    integration.accelerate()
    expected = generated(model, use_cache=False, **given)
    integration.restore()
    integration.accelerate()
    assert torch.equal(generated(model, **given), expected)
    calls = integration.paths()
    steps = sum(calls[function]["reference"] for function in calls if function in DECODING)
    prompts = sum(calls[function]["reference"] for function in calls if function not in DECODING)
    layers = SIZES["num_hidden_layers"]
    assert (prompts, steps) == ((layers, layers * (NEW - 1)) if length > 64 else (0, layers * NEW))
