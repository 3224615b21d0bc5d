"""Hugging Face's models of the gated delta rule and of KDA, which call fla, by these kernels."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

from .fla_calls import MARKS

pytestmark = MARKS

NAMES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "olmo_hybrid": "OlmoHybrid"}
MODELS = list(NAMES)
KDA = "kimi_linear"  # the one of KDA
NAMES[KDA] = "KimiLinear"
LOOPS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # in its modules, in torch or by fla


def on_a_cpu(kind: str) -> integration.Path:
    """What serves a model here."""
    function = "chunk_kda" if kind == KDA else "chunk_gated_delta_rule"
    return integration.Path(function, "reference", "the tensors are on a CPU")


def make_model(kind: str, **sizes: Any) -> tuple[nn.Module, Any]:
    """A small model of its own configuration, and the module of its code."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    own = {
        "qwen3_next": {**experts, "head_dim": 16, "shared_expert_intermediate_size": 16},
        "qwen3_5": {"head_dim": 16},
        "olmo_hybrid": {"linear_num_value_heads": 2, "linear_value_head_dim": 32},
        KDA: {
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 2,
            "mlp_layer_types": ["dense", "dense"],
        },
    }[kind]
    text = "Text" if kind == "qwen3_5" else ""
    config = getattr(transformers, f"{NAMES[kind]}{text}Config")(**common | own | sizes)
    model = getattr(transformers, f"{NAMES[kind]}ForCausalLM")(config)
    return model, importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


@contextmanager
def its_own_loop(module: Any) -> Iterator[None]:
    """Hugging Face's loop in torch in the place of fla's function, which its module has in a closure, taken
    on import."""
    (name,) = (loop for loop in LOOPS if hasattr(module, loop))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, inspect.unwrap(getattr(module, name)))
        yield


def draw_tokens(model: Any, length: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2, 64, (2, length), generator=generator).to(model.device)


def results(model: nn.Module, length: int = 70) -> dict[str, Tensor]:
    """Loss, logits and gradients of a step of training; logits of a prefill in two parts with a cache."""
    tokens = draw_tokens(model, length)
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        first = model(input_ids=tokens[:, :40], use_cache=True)
        second = model(input_ids=tokens[:, 40:], past_key_values=first.past_key_values, use_cache=True)
    return found | {"prefill": torch.cat([first.logits, second.logits], dim=1)}


def assert_packed_is_alone(
    kind: str, path: integration.Path, device: str, dtype: torch.dtype, **tolerance: Any
) -> None:
    """The delta rule of packed sequences is that of each alone, as the model's module calls it.

    Args:
        path: what serves the calls.
        tolerance: of torch.testing.assert_close.
    """
    _, module = make_model(kind)
    integration.accelerate()
    shapes = [(1, 70, 2, 16), (1, 70, 2, 16), (1, 70, 4, 32), (1, 70, 4), (1, 70, 4)]
    q, k, v, g, beta = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    tokens = q, k, v, g, beta = q, k, v, -g.float().abs(), beta.sigmoid()
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "initial_state": None}
    offsets = torch.tensor([0, 25, 70], dtype=torch.int32)
    run = module.torch_chunk_gated_delta_rule
    o, last = run(q, k, v, g=g, beta=beta, cu_seqlens=offsets.to(device), **options)
    assert integration.last_path() == path and last.shape == (2, 4, 16, 32)
    for j, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        q, k, v, g, beta = (t[:, start:end] for t in tokens)
        alone, alone_last = run(q, k, v, g=g, beta=beta, cu_seqlens=None, **options)
        torch.testing.assert_close(o[:, start:end], alone, **tolerance)
        torch.testing.assert_close(last[j : j + 1], alone_last, **tolerance)


@pytest.mark.parametrize("kind", NAMES)
def test_models_of_hugging_face(kind: str) -> None:
    """Against its own loop in torch."""
    model, module = make_model(kind)
    with its_own_loop(module):
        expected = results(model)
    integration.accelerate()
    found = results(model)
    assert integration.last_path() == on_a_cpu(kind)
    assert found.keys() == expected.keys() and any("A_log" in name for name in found)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
    torch.testing.assert_close(found["prefill"], found["logits"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_input_of_hugging_face(kind: str) -> None:
    """Which its own loop in torch refuses."""
    assert_packed_is_alone(kind, on_a_cpu(kind), "cpu", torch.float32)
