"""Keywords of fla's functions: taken, ignored and refused as fla does, with the real package."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.integrations import fla as integration

from .fla_calls import ALL, ENDS, MARKS, own

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*transpose_state_layout.* is deprecated")]

# fla's modules whose functions end in a FusedRecurrentFunction
RECURRENT = [f"fla.ops.{family}.fused_recurrent" for family in ("common", "delta_rule", "gated_delta_rule")]
OFFSETS = torch.tensor([0, 10, 40])
KEYWORDS: list[dict[str, Any]] = [
    {"something": 1},
    {"backend": "reference"},
    {"head_first": False},
    {"chunk_size": 32},
    {"chunk_size": 48},
    {"cu_seqlens": OFFSETS},
    {"cu_seqlens_cpu": OFFSETS},
    {"cu_seqlens": OFFSETS, "cu_seqlens_cpu": OFFSETS},
    {"g_gamma": torch.tensor([-0.1, -0.2])},
    {"state_v_first": True},
    {"transpose_state_layout": True},
    {"transpose_state_layout": True, "state_v_first": False},
    {"transpose_state_layout": True, "state_v_first": True},
    {"allow_neg_eigval": True},
    {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"A_log": torch.zeros(2)},
    {"q": torch.zeros(1, 40, 2, 16)},
]
# handed to fla's kernels, which do not use them without cu_seqlens, or without use_gate_in_kernel
NOT_USED_ALONE = {"cu_seqlens_cpu", "A_log"}


def arguments(name: str) -> list[Any]:
    """By their place: one sequence in bf16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 40, 2, 16, generator=generator).bfloat16() for _ in range(4))
    g = torch.nn.functional.logsigmoid(g.float())
    token, beta = g[..., 0], g[..., 1].exp()
    gates = {"chunk_gla": [g], "chunk_delta_rule": [beta], "chunk_gated_delta_rule": [token, beta]}
    gates |= {
        "chunk_lightning_attn": [1, 4],
        "fused_recurrent_gla": [g],
        "fused_recurrent_delta_rule": [beta],
    }
    gates |= {"fused_recurrent_gated_delta_rule": [token]}
    gates |= {"chunk_kda": [g, beta], "fused_recurrent_kda": [g, beta]}
    return [q, torch.nn.functional.normalize(k, dim=-1), v, *gates.get(name, [])]


def outcome(name: str, **keywords: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return own(name)(*arguments(name), output_final_state=True, **keywords)
    except (Exception, DeprecationWarning) as error:
        return type(error)


def differ(one: Any, other: Any) -> bool:
    """Whether two results are of different values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return any(map(differ, one, other))
    return bool(one is not other and one != other)


@pytest.mark.parametrize("name", ALL)
def test_as_fla_takes_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls raise the same, and what changes nothing in fla changes nothing here."""
    with monkeypatch.context() as patch:
        for module, end in (ENDS | dict.fromkeys(RECURRENT, "FusedRecurrentFunction")).items():
            # fla's own function returns all that it would hand to its kernels
            function = getattr(importlib.import_module(module), end)
            patch.setattr(function, "apply", lambda *args: (args, None))
        module = importlib.import_module("fla.ops.kda.fused_recurrent")
        patch.setattr(module, "fused_recurrent_kda_fwd", lambda **given: (tuple(given.values()), None))
        plain, expected = outcome(name), [outcome(name, **keywords) for keywords in KEYWORDS]
    integration.accelerate(name)
    served = outcome(name)
    for keywords, wanted in zip(KEYWORDS, expected, strict=True):
        found = outcome(name, **keywords)
        if isinstance(wanted, type) or isinstance(found, type):
            assert found is wanted, keywords
        elif "chunk_size" not in keywords:  # on which the result depends by rounding alone
            changes = differ(wanted, plain) and not NOT_USED_ALONE.issuperset(keywords)
            assert differ(found, served) == changes, keywords


def test_the_old_name_of_state_v_first() -> None:
    """Told with a warning, by the function in fla's place and by fla's dispatch."""
    kept = own("chunk_gated_delta_rule")
    integration.accelerate()
    x = arguments("chunk_gated_delta_rule")
    x[2] = torch.cat([x[2], x[2]], dim=-1)
    for function in (kept, own("chunk_gated_delta_rule")):
        expected = function(*x, output_final_state=True, state_v_first=True)
        for given in ({}, {"state_v_first": False}):
            with pytest.warns(DeprecationWarning, match="transpose_state_layout is deprecated"):
                found = function(*x, output_final_state=True, transpose_state_layout=True, **given)
            assert found[1].shape == (1, 2, 32, 16) and not differ(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(*x)


def test_offsets_on_the_cpu_alone_by_their_place() -> None:
    integration.accelerate()
    x = arguments("chunk_simple_gla")
    expected = own("chunk_simple_gla")(*x)
    found = own("chunk_simple_gla")(*x, None, None, None, None, False, False, None, OFFSETS)
    assert not differ(found, expected)
