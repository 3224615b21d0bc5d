"""Inputs of chunk_simple_gla, and a stand-in for its launches."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tfla_tk.backends.tk import scalar_gate
from tfla_tk.core.layout import Cut, KeptStates
from tfla_tk.ops import simple_gla as simple_gla_ops

from .linear import Inputs

LEFT = KeptStates(torch.arange(3.0), Cut(4, 2), (8, 16))  # what a forward leaves for its backward


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


def layout(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


class Kernels(ModuleType):
    """The launches with the op's CPU code: None in place of empty tensors, and a log of the calls."""

    def __init__(self) -> None:
        super().__init__(f"{scalar_gate.__name__}.scalar_decay")
        self.calls: list[str] = []
        self.tensors: tuple[Any, ...] = ()
        self.needs_gates: list[bool] = []

    def read(self) -> tuple[Tensor, ...]:
        """q, k, v and the initial state of the last call."""
        q, k, v, _, initial_state, _ = self.tensors
        return q, k, v, initial_state

    def simple_gla_fwd(self, *args: Any) -> tuple[Tensor | None, ...]:
        args, keeps = args[:9], args[9:] == (True,)
        self.calls.append("forward, kept" if keeps else "forward")
        self.tensors = args[:6]
        o, last = simple_gla_ops._fwd_cpu(*args)
        kept = LEFT._replace(workspace=LEFT.workspace.clone()) if keeps else None
        return o, last if args[7] else None, kept

    def prepare_simple_gla_fwd(self, *args: Any) -> Callable[..., Any]:
        """Calls `simple_gla_fwd`; a decay per head comes as [HV]."""
        (*expected, options), keeps = (*map(layout, args[:6]), args[6:9]), args[9]

        def run(*tensors: Any) -> Any:
            assert [*map(layout, tensors)] == expected
            q, k, v, g, *others = tensors
            g = g if g is None or g.dim() == 3 else g.expand(v.shape[:3])
            return self.simple_gla_fwd(q, k, v, g, *others, *options, *([True] if keeps else []))

        return run

    def simple_gla_bwd(self, *args: Any) -> tuple[Tensor | None, ...]:
        *args, kept = args
        if args[3] is not None and args[3].dim() == 1:
            args[3] = args[3].expand(args[2].shape[:3])
        assert kept is None or (torch.equal(kept.workspace, LEFT.workspace) and kept.cut == LEFT.cut)
        self.calls.append("backward" if kept is None else "backward, kept")
        self.needs_gates.append(args[10])
        return tuple(None if x.numel() == 0 else x for x in simple_gla_ops._bwd_cpu(*args))
