"""Hugging Face's models of the gated delta rule and of KDA on the GPU, in bf16: with these kernels in the
place of fla's function they train and infer as before, but for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfla_tk
from tfla_tk.backends.triton import fla
from tfla_tk.integrations import fla as integration

from ..cpu.integrations.test_fla_transformers import (
    KDA,
    MODELS,
    assert_packed_is_alone,
    draw_tokens,
    its_own_loop,
    make_model,
    results,
)
from .accuracy import DEVICE, relative_error
from .test_fla import restored  # noqa: F401

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("hardly_tuned", "fla_alone")

# heads as wide as those of the published models
OF_QWEN = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
OF_OLMO = {"linear_key_head_dim": 96, "linear_value_head_dim": 192}
OF_OLMO |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
SIZES = {"qwen3_next": OF_QWEN, "qwen3_5": OF_QWEN, "olmo_hybrid": OF_OLMO, KDA: {"linear_head_dim": 128}}
LENGTH = 200
PREFILLED = LENGTH - 8
# relative errors that rounding to bf16 makes between two ways to serve the same model
LOGITS, GRADIENTS = 3e-2, 6e-2

before = pytest.mark.parametrize("before", ["its own loop", "fla"])
of_every_kind = pytest.mark.parametrize("kind", SIZES)


def rule_of(kind: str) -> str:
    """In the names of functions."""
    return "kda" if kind == KDA else "gated_delta_rule"


def on_tk(kind: str) -> integration.Path:
    return integration.Path(f"chunk_{rule_of(kind)}", "tk")


def make(kind: str) -> tuple[nn.Module, Any]:
    """Of weights so large that the delta rule matters, and decays so slow that its states do."""
    model, module = make_model(kind, initializer_range=0.1, **SIZES[kind])
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            nn.init.uniform_(parameter, -4, -2)
    return model.to(DEVICE, torch.bfloat16), module


@contextmanager
def served_by(name: str, kind: str, module: Any) -> Iterator[None]:
    """Hugging Face's loop in torch, or fla's function where fla does not refuse its backward."""
    if name == "fla":
        if kind != KDA and fla.gated_backward_is_guarded():
            pytest.skip("fla refuses its gated backward with this Triton")
        yield
    else:
        with its_own_loop(module):
            yield
    assert integration.last_path() is None


def losses(model: nn.Module) -> list[float]:
    """Of a few steps of training."""
    tokens = draw_tokens(model, LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def continued(model: nn.Module) -> Tensor:
    """Logits of tokens one by one after a prefill, from whose state the decoding kernels go on."""
    tokens, found = draw_tokens(model, LENGTH), []
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :PREFILLED], use_cache=True).past_key_values
        for t in range(PREFILLED, LENGTH):
            out = model(input_ids=tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            found.append(out.logits)
    return torch.cat(found, dim=1)


@of_every_kind
@before
def test_loss_logits_and_gradients_are_the_same(before: str, kind: str) -> None:
    model, module = make(kind)
    with served_by(before, kind, module):
        expected = results(model, LENGTH)
    integration.accelerate()
    found = results(model, LENGTH)
    assert integration.last_path() == on_tk(kind)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.pop("loss"), expected.pop("loss"), rtol=2e-3, atol=0)
    errors = {name: relative_error(t, expected[name]) for name, t in found.items()}
    limits = dict.fromkeys(errors, GRADIENTS) | {"logits": LOGITS, "prefill": LOGITS}
    assert not {name: error for name, error in errors.items() if not error <= limits[name]}
    assert relative_error(found["prefill"], found["logits"]) <= LOGITS


@of_every_kind
@before
def test_models_train_to_the_same_loss(before: str, kind: str) -> None:
    model, module = make(kind)
    with served_by(before, kind, module):
        expected = losses(model)
    integration.accelerate()
    found = losses(make(kind)[0])
    assert integration.last_path() == on_tk(kind)
    assert found[-1] < found[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


@of_every_kind
def test_tokens_after_a_prefill(kind: str) -> None:
    model, module = make(kind)
    with its_own_loop(module):
        expected = continued(model)
    integration.accelerate()
    found = continued(model)
    assert {name: set(found) for name, found in integration.paths().items()} == {
        f"chunk_{rule_of(kind)}": {"tk"},
        f"fused_recurrent_{rule_of(kind)}": {"tk"},
    }
    assert relative_error(found, expected) <= LOGITS


@pytest.mark.parametrize("kind", MODELS)
def test_packed_input(kind: str) -> None:
    """Bitwise."""
    with tfla_tk.batch_invariant():
        assert_packed_is_alone(kind, on_tk(kind), DEVICE, torch.bfloat16, rtol=0, atol=0)
