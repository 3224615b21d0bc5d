"""Inputs of chunk_simple_gla, and a stand-in for its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk.backends.tk import scalar_gate
from tfla_tk.ops import linear as linear_ops

from . import linear
from .linear import LAYOUT, Inputs


def draw(
    *, batch: int = 2, seq: int = 40, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float64, rows: int | None = None, seed: int = 0,
) -> Inputs:  # fmt: skip
    """q, k, v, g and initial_state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = (normal(batch, seq, heads[0], dims[0]) for _ in range(2))
    v = normal(batch, seq, heads[1], dims[1])
    g = logsigmoid(normal(batch, seq, heads[1]))
    state = normal(batch if rows is None else rows, heads[1], *dims)
    return {"q": q, "k": k, "v": v, "g": g, "initial_state": state}


class Kernels(linear.Kernels):
    """The launches with the op's CPU code: None in place of empty tensors, and a log of the calls."""

    def __init__(self) -> None:
        super().__init__(linear_ops.simple_gla, f"{scalar_gate.__name__}.scalar_decay")

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Of the last forward."""
        return tuple(self.core[:6])

    def prepare(self, core: Any, *, output_final_state: bool, keep: bool) -> Callable[..., Any]:
        """Calls `forward`; a decay per head comes as [HV]."""
        expected = [*map(layout, core[:6])]

        def run(*tensors: Any) -> Any:
            assert [*map(layout, tensors)] == expected
            q, k, v, g, *others = tensors
            g = g if g is None or g.dim() == 3 else g.expand(v.shape[:3])
            inputs = core._replace(q=q, k=k, v=v, g=g, initial_state=others[0], cu_seqlens=others[1])
            return self.forward(inputs, output_final_state=output_final_state, keep=keep)

        return run

    def backward(
        self, core: Any, kept: Any, do: Tensor, dht: Any, *, needs_gates: bool, final_state: Any = None
    ) -> tuple[Tensor | None, ...]:
        if core.g is not None and core.g.dim() == 1:
            core = core._replace(g=core.g.expand(core.v.shape[:3]))
        if kept is not None:
            assert torch.equal(kept.tensors[0], self.left) and kept.layout == LAYOUT
        self.calls.append("backward" if kept is None else "backward, kept")
        self.needs_gates.append(needs_gates)
        self.batch_invariant.append(core.batch_invariant)
        found = self.ops._bwd_cpu(*core[:6], final_state, do, dht, *core[6:], needs_gates)
        return tuple(None if x.numel() == 0 else x for x in found)


def layout(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)
