"""What only the operators without normaliser have: decays per head, grouped heads, extreme decay."""

from __future__ import annotations

import math

import pytest
import torch

from tfla_tk import reference

from .conftest import Tensors, assert_close, linear_drawer


def draw(length: int, heads: int = 4) -> Tensors:
    return linear_drawer("")(length, heads=heads)[0]


def test_retention_log_decay() -> None:
    expected = [math.log(1 - 2.0 ** (-5 - h)) for h in range(4)]
    decay = reference.retention_log_decay(4, dtype=torch.float64)
    torch.testing.assert_close(decay, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_lightning_log_decay() -> None:
    expected = [-(8 / 4) * (1 - 3 / 12) * h for h in range(4)]
    decay = reference.lightning_log_decay(4, layer_idx=3, num_layers=12, dtype=torch.float64)
    torch.testing.assert_close(decay, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_decay_per_head_equals_decay_per_token(form: str) -> None:
    q, k, v = draw(70)
    gamma = reference.lightning_log_decay(4, 3, 12, dtype=torch.float64)
    g = torch.nn.functional.logsigmoid(torch.randn(2, 70, 4, dtype=torch.float64))
    function = getattr(reference, f"simple_gla_{form}")
    assert_close(function(q, k, v, g_gamma=gamma)[0], function(q, k, v, gamma.expand(2, 70, 4))[0])
    assert_close(function(q, k, v, g, gamma)[0], function(q, k, v, g + gamma)[0])


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_no_decay_is_causal_linear_attention(form: str) -> None:
    q, k, v = draw(70)
    scores = torch.einsum("bthk,bjhk->bhtj", q, k).tril() * 0.25
    o, state = getattr(reference, f"simple_gla_{form}")(q, k, v, scale=0.25)
    assert state is None
    assert_close(o, torch.einsum("bhtj,bjhv->bthv", scores, v))


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])
def test_gla_with_equal_channels_is_simple_gla(form: str) -> None:
    q, k, v = draw(70)
    g = torch.nn.functional.logsigmoid(torch.randn(2, 70, 4, dtype=torch.float64))
    o, _ = getattr(reference, f"gla_{form}")(q, k, v, g[..., None].expand(q.shape))
    assert_close(o, reference.simple_gla_recurrent(q, k, v, g)[0])


def test_written_value_is_read_back() -> None:
    """With beta = 1 and no decay, reading with the key just written returns its value."""
    _, k, v = draw(50)
    k = torch.nn.functional.normalize(k, dim=-1)
    o, _ = reference.delta_rule_chunkwise(k, k, v, torch.ones_like(k[..., 0]), scale=1.0)
    assert_close(o, v)


def test_gated_delta_rule_refuses_uneven_groups() -> None:
    q, k, _ = draw(5, heads=4)
    _, _, v = draw(5, heads=6)
    with pytest.raises(ValueError, match="v: expected a multiple of q's 4 heads, got 6"):
        reference.gated_delta_rule_chunkwise(q, k, v, v[..., 0], v[..., 0])
