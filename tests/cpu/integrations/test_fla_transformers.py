"""Hugging Face's models of the gated delta rule, which call fla, by these kernels."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
]

ON_A_CPU = integration.Path("chunk_gated_delta_rule", "reference", "the tensors are on a CPU")


def make_model(kind: str) -> tuple[nn.Module, Any]:
    """A small model of its own configuration, and the module of its code."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if kind == "qwen3_next":
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        config = transformers.Qwen3NextConfig(
            **common, **experts, head_dim=16, shared_expert_intermediate_size=16
        )
        model = transformers.Qwen3NextForCausalLM(config)
    else:
        heads = {"linear_num_value_heads": 2, "linear_value_head_dim": 32}
        config = transformers.OlmoHybridConfig(**common | heads)
        model = transformers.OlmoHybridForCausalLM(config)
    return model, importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


MODELS = ["qwen3_next", "olmo_hybrid"]


def results(model: nn.Module) -> dict[str, Tensor]:
    """Loss, logits and gradients of a step of training; logits of a prefill in two parts with a cache."""
    tokens = torch.randint(2, 64, (2, 70), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        first = model(input_ids=tokens[:, :40], use_cache=True)
        second = model(input_ids=tokens[:, 40:], past_key_values=first.past_key_values, use_cache=True)
    return found | {"prefill": torch.cat([first.logits, second.logits], dim=1)}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_hugging_face(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against its own loop in torch. Its module has fla's function in a closure, taken on import."""
    model, module = make_model(kind)
    with monkeypatch.context() as patch:
        name = "torch_chunk_gated_delta_rule"
        patch.setattr(module, name, inspect.unwrap(getattr(module, name)))
        expected = results(model)
    integration.accelerate()
    found = results(model)
    assert integration.last_path() == ON_A_CPU
    assert found.keys() == expected.keys() and any("A_log" in name for name in found)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
    torch.testing.assert_close(found["prefill"], found["logits"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_input_of_hugging_face(kind: str) -> None:
    """The delta rule of packed sequences is that of each alone; its own loop in torch refuses them."""
    _, module = make_model(kind)
    integration.accelerate()
    shapes = [(1, 70, 2, 16), (1, 70, 2, 16), (1, 70, 4, 32), (1, 70, 4), (1, 70, 4)]
    q, k, v, g, beta = (torch.randn(shape) for shape in shapes)
    tokens = q, k, v, g, beta = q, k, v, -g.abs(), beta.sigmoid()
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "initial_state": None}
    offsets = torch.tensor([0, 25, 70], dtype=torch.int32)
    run = module.torch_chunk_gated_delta_rule
    o, last = run(q, k, v, g=g, beta=beta, cu_seqlens=offsets, **options)
    assert integration.last_path() == ON_A_CPU and last.shape == (2, 4, 16, 32)
    for j, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        q, k, v, g, beta = (t[:, start:end] for t in tokens)
        alone, alone_last = run(q, k, v, g=g, beta=beta, cu_seqlens=None, **options)
        torch.testing.assert_close(o[:, start:end], alone)
        torch.testing.assert_close(last[j : j + 1], alone_last)
