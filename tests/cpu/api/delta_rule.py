"""Inputs of the delta rule."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import delta_rule, reference
from tfla_tk.backends.tk import delta_rule as package

from . import linear
from .linear import Inputs

FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


LAUNCH = f"{package.__name__}.launch"  # the module of the kernels


def serve_by(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tk backend serves every call, on the CPU, by these kernels."""
    delta_rule._path.plans.clear()
    linear.serve_by(kernels, package, "supports_delta_rule", monkeypatch)


def draw(
    *, batch: int = 2, seq: int = 40, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float64, rows: int | None = None, by_channel: bool = False,
) -> Inputs:  # fmt: skip
    """q, k of norm 1, v, g, which KDA has by channel, beta and initial_state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate = (batch, seq, heads[1])
    found = {
        "q": normal(batch, seq, heads[0], dims[0]),
        "k": normalize(normal(batch, seq, heads[0], dims[0]), dim=-1),
        "v": normal(batch, seq, heads[1], dims[1]),
        "g": logsigmoid(normal(*gate, *([dims[0]] if by_channel else []))),
        "beta": torch.sigmoid(normal(*gate)),
        "initial_state": normal(batch if rows is None else rows, heads[1], *dims),
    }
    return {name: x.to(dtype) for name, x in found.items()}


def draw_raw(**options: Any) -> Inputs:
    """The same before norm, gate and sigmoid, with A_log and dt_bias."""
    x = draw(**options)
    heads = x["v"].shape[2]
    channels = x["q"].shape[3] if options.get("by_channel") else 1
    sizes = (-1, 0.5, heads), (0.5, -2, heads * channels)
    a_log, dt_bias = (torch.linspace(*of).to(x["q"].dtype) for of in sizes)
    return x | {"k": 3 * x["k"], "g": 4 * x["g"] + 2, "A_log": a_log, "dt_bias": dt_bias}


def from_raw(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """The recurrence of what the flags make of raw inputs: all of FLAGS."""
    parameters = (options.pop(name, None) for name in ("A_log", "dt_bias", "lower_bound"))
    g = reference.delta_log_decay(g, *parameters)
    q, k = reference.l2_norm(q), reference.l2_norm(k)
    beta = reference.writing_strength(beta, True)
    return reference.gated_delta_rule_recurrent(q, k, v, g, beta, **options)
