"""The operators in [B, T, H, D] behind one interface, each with a stand-in for its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch.nn.functional import logsigmoid

from tfla_tk import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    delta_rule,
    gla,
    kda,
    reference,
    simple_gla,
)
from tfla_tk.backends import tk
from tfla_tk.backends.tk import channel_gate, scalar_gate
from tfla_tk.backends.tk import kda as tk_kda
from tfla_tk.ops import delta_rule as delta_rule_ops
from tfla_tk.ops import linear as linear_ops

from . import delta_rule as delta_inputs
from . import simple_gla_calls
from .linear import Inputs, Kernels, serve_by

INTRA, STATE = (64 + 64) * (16 + 32), 16 * 32  # FLOPs per token and head


@dataclass(frozen=True)
class Family:
    """A public function, or one with flags.

    Attributes:
        op: what its registered ops are called. told: what it is called in messages.
        path: of its module, which keeps plans.
        state_flops: times STATE, of a forward and of a forward and a backward.
        public: the functions whose choice of a backend `doctor` tells.
    """

    name: str
    op: str
    told: str
    function: Callable[..., Any]
    recurrent: Callable[..., Any]
    draw: Callable[..., Inputs]
    path: Any
    serve: Callable[[pytest.MonkeyPatch], Any]
    state_flops: tuple[int, int]
    public: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def draw_gla(*, heads: int | tuple[int, int] = 2, **options: Any) -> Inputs:
    """q, k, v, g and initial_state; all have as many heads."""
    count = heads if isinstance(heads, int) else heads[0]
    x = simple_gla_calls.draw(heads=(count, count), **options)
    return x | {"g": logsigmoid(simple_gla_calls.draw(heads=(count, count), seed=1, **options)["k"])}


def draw_without_decay(**options: Any) -> Inputs:
    x = delta_inputs.draw(**options)
    del x["g"]
    return x


def serve_simple_gla(patch: pytest.MonkeyPatch) -> simple_gla_calls.Kernels:
    return serve_by(simple_gla_calls.Kernels(), scalar_gate, "supports_simple_gla", patch)


def serve_gla(patch: pytest.MonkeyPatch) -> Kernels:
    return serve_by(Kernels(linear_ops.gla, channel_gate.__name__), tk, "supports_gla", patch)


def serve_delta_rule(patch: pytest.MonkeyPatch) -> Kernels:
    module = Kernels(delta_rule_ops.delta_rule, delta_inputs.LAUNCH)
    delta_inputs.serve_by(module, patch)
    return module


def serve_kda(patch: pytest.MonkeyPatch) -> Kernels:
    return serve_by(Kernels(delta_rule_ops.kda, tk_kda.__name__), tk, "supports_kda", patch)


DELTA = (delta_rule._path, serve_delta_rule, (6, 24), ("chunk_delta_rule", "chunk_gated_delta_rule"))
SIMPLE_GLA = Family(
    *("simple_gla", "simple_gla", "simple GLA", chunk_simple_gla, reference.simple_gla_recurrent),
    *(simple_gla_calls.draw, simple_gla._path, serve_simple_gla, (4, 14)),
    ("chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"),
)
GLA = Family(
    *(
        "gla",
        "gla",
        "GLA",
        chunk_gla,
        reference.gla_recurrent,
        draw_gla,
        gla._path,
        serve_gla,
        (4, 12),
    ),
    ("chunk_gla",),
)
GATED = Family(
    *("gated_delta_rule", "delta_rule", "the delta rule", chunk_gated_delta_rule),
    *(reference.gated_delta_rule_recurrent, delta_inputs.draw, *DELTA),
)
RAW = Family(
    "delta_rule_of_raw_inputs", "delta_rule", "the delta rule",
    functools.partial(chunk_gated_delta_rule, **delta_inputs.FLAGS),
    delta_inputs.from_raw, delta_inputs.draw_raw, *DELTA,
)  # fmt: skip
UNGATED = Family(
    *("delta_rule", "delta_rule", "the delta rule", chunk_delta_rule, reference.delta_rule_recurrent),
    *(draw_without_decay, *DELTA),
)
OF_KDA = (kda._path, serve_kda, (6, 24), ("chunk_kda",))
KDA = Family(
    *("kda", "kda", "KDA", chunk_kda, reference.kda_recurrent),
    *(functools.partial(delta_inputs.draw, by_channel=True), *OF_KDA),
)
RAW_KDA = Family(
    *("kda_of_raw_inputs", "kda", "KDA", functools.partial(chunk_kda, **delta_inputs.FLAGS)),
    *(delta_inputs.from_raw, functools.partial(delta_inputs.draw_raw, by_channel=True), *OF_KDA),
)
PLAIN = (SIMPLE_GLA, GLA, GATED, KDA)
FAMILIES = (*PLAIN, RAW, RAW_KDA)
