"""Gradients of log decays by the explicit formulas in fp32, however strong the decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import reference

TOKENS = 1024


def draw(gate: str, bias: float) -> list[Tensor]:
    """Inputs in fp32: a token or channel keeps about e^bias of the state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    if gate == "f":
        q, k, v = (normal(2, TOKENS, 8) for _ in range(3))
        return [q, k, v, normal(2, TOKENS), normal(2, TOKENS) + bias]
    q, k, v = (normal(TOKENS, 2, 8) for _ in range(3))
    g = logsigmoid(normal(TOKENS, 2, *([8] if gate.startswith("channel") else [])) + bias)
    if gate.endswith("delta"):
        return [q, normalize(k, dim=-1), v, g, torch.sigmoid(normal(TOKENS, 2))]
    return [q, k, v, g]


FAMILIES = {
    "simple_gla": ("token", reference.simple_gla_chunkwise, reference.simple_gla_backward, 3),
    "gla": ("channel", reference.gla_chunkwise, reference.gla_backward, 3),
    "gated_delta_rule": (
        "delta",
        reference.gated_delta_rule_chunkwise,
        reference.gated_delta_rule_backward,
        3,
    ),
    "kda": ("channel, delta", reference.kda_chunkwise, reference.kda_backward, 3),
    "mlstm": (
        "f",
        reference.mlstm_chunkwise,
        lambda *x: reference.mlstm_backward(*x[:5], None, None, None, x[5]),
        4,
    ),
    "mlstm_siging": (
        "f",
        reference.mlstm_siging_chunkwise,
        lambda *x: reference.mlstm_siging_backward(*x[:5], None, None, x[5]),
        4,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias", [3.0, -5.0, -15.0, -60.0])
def test_gradients_of_log_decays(family: str, bias: float) -> None:
    gate, forward, backward, place = FAMILIES[family]
    x = draw(gate, bias)
    do = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1))
    leaves = [t.double().requires_grad_() for t in x]
    out = forward(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    (expected,) = torch.autograd.grad(out, leaves[place], do.double())
    found = backward(*x, do)[place]
    assert (found - expected).norm() <= 1e-5 * expected.norm()
