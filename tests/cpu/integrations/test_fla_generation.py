"""Hugging Face's models generate: `accelerate` serves every step, on a CPU by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

from .test_fla_transformers import KDA, MODELS, draw_tokens, its_own_loop, make_model

pytestmark = [
    pytest.mark.usefixtures("restored"),
    pytest.mark.filterwarnings("ignore:Triton is not supported"),
]

NEW = 5


def generated(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.generate(
            tokens, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options
        )
    return found


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


def test_beams_and_left_padding_of_hugging_face() -> None:
    model, module = make_model("qwen3_next", initializer_range=0.3)
    model.eval()
    tokens = draw_tokens(model, 30)
    tokens[0, :11] = 0  # padding
    options = {"num_beams": 3, "attention_mask": (tokens != 0).long()}
    with its_own_loop(module):
        expected = generated(model, tokens, use_cache=False, **options)
    integration.accelerate()
    assert torch.equal(generated(model, tokens, **options), expected)
