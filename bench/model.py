"""A byte-level language model in the shape of xLSTM-7B, mLSTM layers and gated MLPs, and how one is trained.

Source: Beck et al., "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference" (2025). The mLSTM itself
comes as a function, so that models differ in the backend alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

VOCABULARY = 256
NORM_EPS = 1e-6
GATE_CAP = 15.0
FORGET_BIASES = (3.0, 6.0)
GRADIENT_NORM = 1.0  # that gradients are clipped to

Cell = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        input_bias: of the input gates at the start; at -10 they are nearly closed.
        cell: h [B, NH, S, V] from q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S], where NH V is the
            width and K = V / 2.
    """

    def __init__(self, blocks: int, width: int, heads: int, input_bias: float, cell: Cell) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads, input_bias, cell) for _ in range(blocks)))
        self.norm = nn.RMSNorm(width, NORM_EPS)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, 256] of the next byte, from bytes [B, S] as int64."""
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Block(nn.Module):
    """mLSTM layer and MLP on the residual stream [B, S, width], each behind a norm."""

    def __init__(self, width: int, heads: int, input_bias: float, cell: Cell) -> None:
        super().__init__()
        self.mlstm = nn.Sequential(nn.RMSNorm(width, NORM_EPS), MLSTMLayer(width, heads, input_bias, cell))
        self.mlp = nn.Sequential(nn.RMSNorm(width, NORM_EPS), GatedMLP(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlstm(x)
        return x + self.mlp(x)


class MLSTMLayer(nn.Module):
    """Heads of mLSTM with soft-capped gates, a norm per head and a sigmoid output gate, on [B, S, width].

    The heads' forget gates start between short and long memory. q, k, v are views of [B, S, NH, D]; the gates
    are fp32.
    """

    def __init__(self, width: int, heads: int, input_bias: float, cell: Cell) -> None:
        super().__init__()
        self.heads, self.cell = heads, cell
        self.q, self.k = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.v, self.output_gate, self.output = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gates = nn.Linear(width, 2 * heads)
        self.scale = nn.Parameter(torch.ones(width))
        nn.init.zeros_(self.gates.weight)
        with torch.no_grad():
            self.gates.bias.copy_(
                torch.cat((torch.full((heads,), input_bias), torch.linspace(*FORGET_BIASES, heads)))
            )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rearrange(project(x), "b s (h d) -> b h s d", h=self.heads)
            for project in (self.q, self.k, self.v)
        )
        with torch.autocast(x.device.type, enabled=False):
            gates = GATE_CAP * torch.tanh(self.gates(x.float()) / GATE_CAP)
        i, f = rearrange(gates, "b s (gate h) -> gate b h s", gate=2)
        h = rearrange(self.cell(q, k, v, i, f), "b h s d -> b s h d")
        h = rearrange(F.rms_norm(h, h.shape[-1:], eps=NORM_EPS), "b s h d -> b s (h d)")
        return self.output(torch.sigmoid(self.output_gate(x)) * self.scale * h)


class GatedMLP(nn.Module):
    """SwiGLU on [B, S, width], of 8/3 of the width, rounded up to 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-8 * width // (3 * 64)) * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def train(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    batches: Tensor,
    rates: Sequence[float],
    *,
    autocast: bool,
    advance: Callable[[], object] = lambda: None,
) -> Tensor:
    """Train with AdamW, and return the loss of each step [steps] in nats per token.

    Args:
        logits_of: logits [B, S, vocabulary] of tokens [B, S] by the model.
        batches: of each step [steps, B, S + 1], int64, on the model's device.
        rates: of each step, the learning rate.
        autocast: to bf16, over the parameters as they are.
        advance: called after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    losses = torch.empty(len(batches), device=batches.device)
    for step, (tokens, rate) in enumerate(zip(batches, rates, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            logits = logits_of(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        advance()
    return losses
