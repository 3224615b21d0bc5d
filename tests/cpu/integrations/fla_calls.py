"""fla's functions by their names, and arguments of their calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk.integrations import fla as integration

SCALAR_DECAY = ["chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"]
DECODING = [name for name in integration.FUNCTIONS if name.startswith("fused_recurrent_")]
DISPATCHED = ["chunk_gated_delta_rule", "chunk_kda"]
CHUNKWISE = [*SCALAR_DECAY, "chunk_gla", "chunk_delta_rule", *DISPATCHED]
ALL = [*CHUNKWISE, *DECODING]
# marks of every module that calls fla
MARKS = [pytest.mark.usefixtures("restored"), pytest.mark.filterwarnings("ignore:Triton is not supported")]
# where the chunkwise functions end in fla
ENDS = {
    "fla.ops.simple_gla.chunk": "ChunkSimpleGLAFunction",
    "fla.ops.gla.chunk": "ChunkGLAFunction",
    "fla.ops.delta_rule.chunk": "ChunkDeltaRuleFunction",
    "fla.ops.gated_delta_rule.chunk": "ChunkGatedDeltaRuleFunction",
    "fla.ops.kda.chunk": "ChunkKDAFunction",
}


def own(name: str) -> Callable[..., Any]:
    """fla's function by its name, as fla's module has it now."""
    function: Callable[..., Any] = getattr(importlib.import_module(integration.FUNCTIONS[name]), name)
    return function


def draw_scalar_decay(batch: int = 2, seq: int = 40, rows: int | None = None) -> dict[str, Tensor]:
    """q, k, v, g and initial_state of a call with a scalar decay."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = {"q": normal(batch, seq, 2, 16), "k": normal(batch, seq, 2, 16), "v": normal(batch, seq, 2, 32)}
    x["g"] = torch.nn.functional.logsigmoid(normal(batch, seq, 2))
    return x | {"initial_state": normal(rows or batch, 2, 16, 32)}


FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


def draw_raw(name: str, batch: int = 2, seq: int = 70) -> dict[str, Any]:
    """Raw inputs of one of DISPATCHED, and FLAGS."""
    generator = torch.Generator().manual_seed(0)
    channels = (16,) if name == "chunk_kda" else ()
    shapes = {"q": (batch, seq, 2, 16), "k": (batch, seq, 2, 16), "v": (batch, seq, 4, 32)}
    shapes |= {"g": (batch, seq, 4, *channels), "beta": (batch, seq, 4), "A_log": (4,)}
    shapes["dt_bias"] = (64,) if channels else (4,)
    shapes["initial_state"] = (batch, 4, 16, 32)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | FLAGS


def draw_call(name: str) -> dict[str, Any]:
    """The arguments of a call of one of the chunkwise functions."""
    if name in DISPATCHED:
        return draw_raw(name)
    x: dict[str, Any] = draw_scalar_decay()
    g = x.pop("g")
    gates = {"chunk_simple_gla": {"g": g}, "chunk_gla": {"g": -x["k"].abs()}}
    gates |= {"chunk_lightning_attn": {"layer_idx": 1, "num_layers": 4}}
    gates |= {"chunk_delta_rule": {"beta": g.exp(), "use_qk_l2norm_in_kernel": True}}
    return x | gates.get(name, {})
