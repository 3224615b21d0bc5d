"""Models generate on the kernels: they say what they say without these and a cache, but for rounding."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfla_tk.integrations import fla as integration

from ..cpu.integrations.test_fla_generation import make_fla_model, prompt
from ..cpu.integrations.test_fla_transformers import MODELS, its_own_loop, make_model
from ..cpu.kernels.test_recurrent import NAMES, call, draw, exact
from .accuracy import DEVICE, relative_error
from .test_fla import restored  # noqa: F401
from .test_fla_transformers import SIZES as SIZES_OF_HF
from .test_recurrent import on_gpu

pytest.importorskip("transformers")

NEW, END = 12, 1
LOGITS = 1e-2  # relative; the models are in fp16, which rounds by 5e-4
OF_FLA: dict[str, dict[str, Any]] = {
    "GLA": {"num_heads": 2},
    "HGRN2": {"expand_ratio": 64},
    "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 64, "expand_v": 1},
    "RetNet": {"num_heads": 2},
}
SIZES_OF_FLA = {"hidden_size": 256, "num_hidden_layers": 2, "hidden_ratio": 2, "vocab_size": 64}
SIZES_OF_FLA |= {"initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def make(kind: str) -> tuple[nn.Module, Any]:
    """A model, and what it runs in without a cache and these kernels."""
    if kind in OF_FLA:
        model, truth = make_fla_model(kind, **SIZES_OF_FLA, **OF_FLA[kind]), nullcontext()
    else:
        model, module = make_model(kind, initializer_range=0.1, **SIZES_OF_HF[kind])
        truth = its_own_loop(module)
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                nn.init.uniform_(parameter, -4, -2)  # decays so slow that the states matter
    return model.to(DEVICE, torch.float16).eval(), truth


def said(model: nn.Module, given: dict[str, Any], tokens: Tensor) -> Tensor:
    """The logits [B, NEW, vocabulary] before each of the last tokens, by one pass over all of them.

    The end of the text, which is not allowed before them, has -inf.
    """
    mask = torch.cat([given["attention_mask"], torch.ones_like(tokens[:, -NEW:])], dim=1)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    found = logits[:, -NEW - 1 : -1].float()
    found[..., END] = -torch.inf
    return found


def generated(model: nn.Module, given: dict[str, Any]) -> Any:
    """By these kernels alone."""
    integration.accelerate()
    with torch.no_grad():
        found = model.generate(
            given["tokens"],
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            attention_mask=given["attention_mask"],
            num_beams=given["num_beams"],
        )
    paths = integration.paths()
    integration.restore()
    assert {backend for counts in paths.values() for backend in counts} == {"tk"}
    assert any(name.startswith("fused_recurrent") for name in paths)
    return found


CASES = [
    *itertools.product(MODELS, (1,), (False,)),
    ("qwen3_next", 64, True),
    ("qwen3_5", 65, False),
    ("olmo_hybrid", 100, True),
    ("GLA", 1, False),
    ("GLA", 65, True),
    ("HGRN2", 40, True),
    ("DeltaNet", 100, False),
    ("GatedDeltaNet", 64, True),
    ("RetNet", 100, False),
    ("RetNet", 7, True),
]


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize(("kind", "length", "padded"), CASES)
def test_logits_and_tokens(kind: str, length: int, padded: bool) -> None:
    model, truth = make(kind)
    given = prompt(model, length, padded=padded)
    found = generated(model, given)
    with truth:
        expected = said(model, given, found.sequences)
    logits = torch.stack(found.logits, dim=1).float()
    allowed = torch.arange(logits.shape[-1], device=logits.device) != END
    assert relative_error(logits[..., allowed], expected[..., allowed]) <= LOGITS
    first, second = expected.topk(2, dim=-1).values.unbind(-1)
    clear = first - second > LOGITS * expected[..., allowed].abs().max()
    assert clear.float().mean() > 0.5
    assert torch.equal(found.sequences[:, -NEW:][clear], expected.argmax(-1)[clear])


@pytest.mark.usefixtures("hardly_tuned", "fla_alone")
@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "GLA", "GatedDeltaNet"])
def test_beams(kind: str) -> None:
    """The score of the best beam is that of its tokens: the states follow the beams."""
    model, truth = make(kind)
    given = prompt(model, 70, padded=True, beams=3)
    found = generated(model, given)
    with truth:
        logits = said(model, given, found.sequences)
    of_tokens = logits.log_softmax(-1).gather(-1, found.sequences[:, -NEW:, None])
    scores = of_tokens.mean(dim=(1, 2))
    torch.testing.assert_close(found.sequences_scores.float(), scores, rtol=LOGITS, atol=LOGITS)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_calls(name: str, v_first: bool) -> None:
    """Of 1 to 8 tokens each, in fp32: errors do not grow."""
    lengths = torch.randint(1, 9, (1000,), generator=torch.Generator().manual_seed(3)).tolist()
    v_first = v_first and name != "delta_rule"
    x = on_gpu(draw(name, tokens=sum(lengths), dims=(128, 128), dtype=torch.float32, v_first=v_first))
    expected, expected_last = exact(name, x)
    state = x.pop("initial_state")
    tokens = {key: value for key, value in x.items() if isinstance(value, Tensor)}
    outputs = []
    for part in zip(*(value.split(lengths, dim=1) for value in tokens.values()), strict=True):
        given = x | dict(zip(tokens, part, strict=True)) | {"initial_state": state}
        o, state = call(name, given)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, dim=1), expected) <= 1e-5
    assert relative_error(state, expected_last) <= 1e-5
