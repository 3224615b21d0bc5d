"""Arguments of one token and of a few, and what both have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tfla_tk
from tfla_tk.calls.mlstm import check_mlstm_sequence, check_mlstm_step

NAMES = ("q", "k", "v", "i", "f", "c", "n", "m")

Draw = Callable[..., dict[str, Any]]


def draw_token(dtype: torch.dtype = torch.float32, **replaced: Any) -> dict[str, Any]:
    """The arguments of a step: two heads, dims 16/32."""
    return _draw(((16,), (16,), (32,), (1,), (1,), (16, 32), (16,), (1,)), dtype) | replaced


def draw_tokens(dtype: torch.dtype = torch.float32, seq: int = 5, **replaced: Any) -> dict[str, Any]:
    """The arguments of a few tokens: two heads, dims 16/32."""
    return _draw(((seq, 16), (seq, 16), (seq, 32), (seq,), (seq,), (16, 32), (16,), (1,)), dtype) | replaced


def draw_for(function: str) -> dict[str, Any]:
    """The arguments of a function of one token or a few, by its name."""
    x = (draw_token if "step" in function else draw_tokens)()
    return {name: t for name, t in x.items() if name != "m" or "siging" not in function}


def _draw(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(3, 2, *shape, generator=generator, dtype=torch.float64)
        for name, shape in zip(NAMES, shapes, strict=True)
    }
    return {name: x.to(dtype) if name in "qkv" else x.float() for name, x in drawn.items()}


class Decode(NamedTuple):
    """The functions and ops of one token, or of a few."""

    draw: Draw
    mlstm: Callable[..., Any]
    siging: Callable[..., Any]
    op: Any
    op_in_place: Any
    check: Callable[..., Any]
    supports: str

    def on_gpu(self, inputs: dict[str, Tensor], **changes: Any) -> Any:
        """The call of these arguments, as on a GPU."""
        options = {"sigmoid_gate": False, "normalize": True, "eps": 1e-6, "dtype_state": None}
        call = self.check(**inputs, **options)
        return dataclasses.replace(call, device=torch.device("cuda", 0), **changes)


DECODES = {
    kind: Decode(
        draw,
        *(getattr(tfla_tk, f"mlstm_{gate}{kind}") for gate in ("", "siging_")),
        *(getattr(torch.ops.tfla_tk, f"mlstm_{kind}{in_place}").default for in_place in ("", "_")),
        check,
        f"supports_mlstm_{kind}",
    )
    for kind, draw, check in (
        ("step", draw_token, check_mlstm_step),
        ("sequence", draw_tokens, check_mlstm_sequence),
    )
}


def op_arguments(tokens: dict[str, Tensor], sigmoid_gate: bool, *rest: Any) -> tuple[Any, ...]:
    tensors = [tokens[name] for name in NAMES]
    return (*tensors[:7], None if sigmoid_gate else tensors[7], sigmoid_gate, True, 1e-6, *rest)
