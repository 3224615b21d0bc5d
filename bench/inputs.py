"""Random inputs of the comparison: the same values for every backend, whatever the memory layout."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("bnsd", "bsnd")
FORGET_BIAS = 3.0


def mlstm_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
) -> dict[str, Tensor]:
    """q, k, v, i, f of one mLSTM call, N(0, 1), and f + forget_bias so that the state remembers.

    Args:
        dtype: of q, k, v; the gates are fp32.
        layout: memory order of q, k, v: "bnsd" contiguous, "bsnd" a transposed [B, S, NH, D] as models pass.
        seed: equal seeds give equal values on one device, in either layout.
        forget_bias: mean of f; at 12 the gates forget nothing.

    Returns:
        q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S].
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (shape.B, shape.H, shape.T)
    found = {
        name: _ordered(torch.randn(*rows, dim, generator=generator, dtype=dtype, device=device), layout)
        for name, dim in (("q", shape.K), ("k", shape.K), ("v", shape.V))
    }
    found["i"] = torch.randn(rows, generator=generator, device=device)
    found["f"] = torch.randn(rows, generator=generator, device=device) + forget_bias
    return found


def cotangent_like(output: Tensor, seed: int) -> Tensor:
    """A random gradient of the output, N(0, 1), in its dtype and memory order."""
    generator = torch.Generator(output.device).manual_seed(seed)
    values = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    return torch.empty_like(output).copy_(values)


def _ordered(tensor: Tensor, layout: str) -> Tensor:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    return tensor if layout == "bnsd" else tensor.transpose(1, 2).contiguous().transpose(1, 2)
