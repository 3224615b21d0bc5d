"""Inputs and checks of the delta rule's tests on the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk import chunk_delta_rule, chunk_gated_delta_rule
from tfla_tk.backends.tk.delta_rule.call import Shape
from tfla_tk.calls.delta_rule import DeltaRuleCore
from tfla_tk.core.layout import CHUNK, SEGMENT_CHUNKS

from .accuracy import TOLERANCE
from .linear import Normal, Tensors, check_both, draw_operands, pack, train

SEGMENT = SEGMENT_CHUNKS * CHUNK
GATES = ["usual", "none", "slow", "-10", "mixed", "closed", "half closed"]
# a factor on initial states: of the size of what is written. dg of larger ones is a small difference
OF_WRITTEN = 0.05
LONG = [0, 900, 2 * SEGMENT, SEGMENT + 1, 70, SEGMENT, 0]  # of packed sequences
# of heads of v and slices of V that add up dq and dk; the last of both
KINDS = ["plain", "grouped", "sliced", "both", "without gate"]
BETAS = ["usual", "zero", "small", "half", "one", "up to two", "half zero"]


def shape_of(x: Tensors) -> Shape:
    """Sizes of a call."""
    options: dict[str, Any] = {"g": None, "cu_seqlens": None, "batch_invariant": False}
    return Shape.of(cast(DeltaRuleCore, SimpleNamespace(**{**options, **x})))


def draw(
    batch: int = 2,
    seq: int = 300,
    heads: int = 2,
    value_heads: int | None = None,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "usual",
    betas: str = "usual",
    states: bool = True,
    sequences: int | None = None,
    seed: int = 0,
) -> Tensors:
    """q and k of norm 1, v, g, beta and, on request, an initial state, [B, T, H, D]."""
    normal = Normal(seed)
    value_heads = heads if value_heads is None else value_heads
    found = draw_operands(normal, batch, seq, heads, value_heads, dims, dtype, unit=True)
    g, chosen = logsigmoid(normal(batch, seq, value_heads) + 2), normal(batch, seq, value_heads) > 0
    found["g"] = {
        "usual": g,
        "none": torch.zeros_like(g),
        "slow": 1e-3 * g,
        "-10": torch.full_like(g, -10.0),
        # half of them 0, the others of any size down to -10
        "mixed": torch.where(chosen, 0.0, (20 * g).clamp(min=-10.0)),
        "closed": torch.full_like(g, -torch.inf),
        "half closed": torch.where(chosen, -torch.inf, 0.0),
    }[gates]
    beta = torch.sigmoid(normal(batch, seq, value_heads))
    found["beta"] = {
        "usual": beta,
        "zero": torch.zeros_like(beta),
        "small": torch.full_like(beta, 1e-3),
        "half": torch.full_like(beta, 0.5),
        "one": torch.ones_like(beta),
        "up to two": 2 * beta,
        "half zero": torch.where(chosen, 0.0, beta),
    }[betas]
    if states:
        found["initial_state"] = normal(batch if sequences is None else sequences, value_heads, *dims)
    return found


of_both_functions = pytest.mark.parametrize("gated", [False, True], ids=["without gate", "gated"])


def ungated(x: Tensors) -> Tensors:
    return {name: t for name, t in x.items() if name != "g"}


def function_of(x: Tensors) -> Any:
    return chunk_gated_delta_rule if "g" in x else chunk_delta_rule


def with_keys_of(norm: float, x: Tensors) -> Tensors:
    """About this one instead of 1, token by token."""
    norms = norm * torch.linspace(0.95, 1.05, x["k"].shape[1], device="cuda")[:, None, None]
    return x | {"k": (norms * x["k"]).to(x["k"].dtype)}


def check(
    x: Tensors, function: Any = chunk_gated_delta_rule, wider: dict[str, float] | None = None, **options: Any
) -> None:
    """Forward and backward; wider: other tolerances of gradients."""
    check_both(x, function, {"dv": TOLERANCE[x["v"].dtype]} | (wider or {}), **options)


def gradients(x: Tensors, **options: Any) -> Tensors:
    return train(x, function=function_of(x), **options)


def draw_kind(kind: str, seq: int, batch: int = 2, **options: Any) -> Tensors:
    """Of KINDS."""
    value_heads = {"plain": 2, "grouped": 8, "sliced": 2}.get(kind, 6)
    dims = {"plain": (128, 128), "grouped": (96, 128), "sliced": (128, 192)}.get(kind, (128, 256))
    x = draw(batch, seq, 2, value_heads, dims, **options)
    if kind == "without gate":
        del x["g"]
    return x


def draw_packed(kind: str, lengths: list[int], offsets: torch.dtype = torch.int64, **options: Any) -> Tensors:
    x = draw_kind(kind, sum(lengths), 1, sequences=len(lengths), **options)
    return pack(x, offsets, lengths)


def draw_lengths(kind: str, lengths: list[int] | None, seq: int = 700, **options: Any) -> Tensors:
    """Packed sequences of these lengths, or else a batch of `seq` tokens each."""
    if lengths is None:
        return draw_kind(kind, seq, **options)
    return draw_packed(kind, lengths, **options)


def cotangents(x: Tensors) -> list[Tensor]:
    """Of o and of the last state."""
    normal = torch.Generator("cuda").manual_seed(3)
    return [torch.empty_like(x[name]).normal_(generator=normal) for name in ("v", "initial_state")]
