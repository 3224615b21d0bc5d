"""The recipes of docs/scalar-decay.md: Mamba-2 and MiniMax's slopes as calls of this package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tfla_tk


def mamba2(
    dt: Tensor, A: Tensor, x: Tensor, B: Tensor, C: Tensor, D: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2, h [B, H, P, N]."""
    rows = []
    groups = x.shape[2] // B.shape[2]
    B, C = (y.repeat_interleave(groups, dim=2) for y in (B, C))
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        h = decay * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        rows.append((h * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(rows, dim=1), h


def test_mamba2() -> None:
    """Outputs, state and all gradients, 6 heads over 2 groups."""
    torch.manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    dt_raw, dt_bias, A_log, D = leaf(2, 70, 6), leaf(6), leaf(6), leaf(6)
    x, B, C, h = leaf(2, 70, 6, 8), leaf(2, 70, 2, 16), leaf(2, 70, 2, 16), leaf(2, 6, 8, 16)
    inputs = (dt_raw, dt_bias, A_log, D, x, B, C, h)

    dt = torch.nn.functional.softplus(dt_raw + dt_bias)
    A = -torch.exp(A_log)
    y, state = tfla_tk.chunk_simple_gla(
        C, B, x * dt[..., None], g=dt * A, scale=1.0,
        initial_state=h, output_final_state=True, state_v_first=True,
    )  # fmt: skip
    y = y + D[:, None] * x

    expected, expected_state = mamba2(dt, A, x, B, C, D, h)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, expected_state)
    weights = torch.randn_like(y), torch.randn_like(state)
    found = torch.autograd.grad((y, state), inputs, weights, retain_graph=True)
    wanted = torch.autograd.grad((expected, expected_state), inputs, weights)
    for grad, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("layer_idx", [0, 2])
def test_minimax(layer_idx: int) -> None:
    """The attention of transformers' MiniMaxLightningAttention, over several of its blocks."""
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = minimax.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=4, block_size=32,
        num_key_value_heads=4, layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = minimax.MiniMaxLightningAttention(config, layer_idx)
    x = torch.randn(2, 100, 32)
    expected, expected_state = layer(x, position_embeddings=None, attention_mask=None)

    qkv = layer.act_fn(layer.qkv_proj(x)).reshape(2, 100, 4, 24)
    q, k, v = qkv.split(8, dim=3)
    num_heads, num_hidden_layers = 4, 4
    heads = torch.arange(1, num_heads + 1)
    slopes = 2.0 ** (-8 * heads / num_heads) * (1 - layer_idx / (num_hidden_layers - 1 + 1e-5) + 1e-5)
    o, state = tfla_tk.chunk_lightning_attn(q, k, v, g_gamma=-slopes, scale=1.0, output_final_state=True)
    o = torch.sigmoid(layer.output_gate(x)) * layer.norm(o.flatten(2))
    torch.testing.assert_close(layer.out_proj(o), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)
