"""Gradients of a call of an operator in [B, T, H, D], and a stand-in for the kernels of a family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla_tk import which
from tfla_tk.backends.tk import linear as tk_linear
from tfla_tk.core.layout import Kept
from tfla_tk.core.support import SUPPORTED
from tfla_tk.ops.linear import LinearOps

Inputs = dict[str, Any]
LAYOUT = (3, 1)  # of what the stand-in keeps


def leaves(inputs: Inputs) -> Inputs:
    """With their strides."""
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}


def heads_first(x: Inputs) -> Inputs:
    """The same numbers with dimensions 1 and 2 swapped in memory, of the initial state the last two."""

    def turned(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dim() < 3:
            return t
        dims = (2, 3) if name == "initial_state" else (1, 2)
        return t.transpose(*dims).contiguous().transpose(*dims)

    return {name: turned(name, t) for name, t in x.items()}


def gradients(function: Callable[..., Any], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o, the final state, both contiguous, and the gradients of a loss that reaches both."""
    x = leaves(inputs)
    o, last = function(**x, **options, output_final_state=True)
    assert o.is_contiguous() and last.is_contiguous()
    generator = torch.Generator().manual_seed(7)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in (o, last))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(x.values()))
    return {"o": o.detach(), "last": last.detach(), **dict(zip(x, grads, strict=True))}


def assert_refused(
    function: Callable[..., Any], arguments: Inputs, error: type[Exception], message: str
) -> None:
    """That the call raises this, and `which` of the call, too."""
    with pytest.raises(error, match=message):
        function(**arguments)
    with pytest.raises(error, match=message):
        which(function.__name__, **arguments)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert actual[name].shape == want.shape, name
        error = (actual[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tol, (name, error)


class Kernels(ModuleType):
    """The kernels with the op's CPU code: None in place of empty tensors, and a log of the calls."""

    left = torch.arange(3.0)

    def __init__(self, ops: LinearOps, name: str) -> None:
        """Args: ops: of the family. name: of the module."""
        super().__init__(name)
        self.ops = ops
        self.calls: list[str] = []
        self.core: Any = None
        self.needs_gates: list[bool] = []
        self.batch_invariant: list[bool] = []

    def read(self) -> tuple[Tensor, ...]:
        """q, k, v and the initial state of the last call; gates of channels are as long as keys."""
        core = self.core
        assert core.g is None or core.g.dim() == 3 or core.g.shape[-1] == core.k.shape[-1]
        return core.q, core.k, core.v, core.initial_state

    def forward(
        self, core: Any, *, output_final_state: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, Kept | None]:
        self.calls.append("forward, kept" if keep else "forward")
        self.core = core
        self.batch_invariant.append(core.batch_invariant)
        o, last = self.ops._fwd_cpu(*core, output_final_state)
        kept = Kept((self.left.clone(), None), LAYOUT) if keep else None
        return o, last if output_final_state else None, kept

    def prepare(self, core: Any, *, output_final_state: bool, keep: bool) -> Callable[..., Any]:
        options = core[self.ops.count :]
        return lambda *inputs: self.forward(
            type(core)(*inputs, *options), output_final_state=output_final_state, keep=keep
        )

    def backward(
        self, core: Any, kept: Kept | None, do: Tensor, dht: Any, *, needs_gates: bool
    ) -> tuple[Tensor | None, ...]:
        if kept is not None:
            assert torch.equal(kept.tensors[0], self.left) and kept.tensors[1] is None
            assert kept.layout == LAYOUT
        self.calls.append("backward" if kept is None else "backward, kept")
        self.needs_gates.append(needs_gates)
        self.batch_invariant.append(core.batch_invariant)
        count = self.ops.count
        found = self.ops._bwd_cpu(*core[:count], do, dht, *core[count:], needs_gates)
        return tuple(None if x.numel() == 0 else x for x in found)


def serve_by(kernels: ModuleType, package: ModuleType, supports: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tk backend serves every call, on the CPU, by these kernels in the place of a package's module.

    Args:
        supports: the function that is asked whether a call is served.
    """
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(package, kernels.__name__.rpartition(".")[2], kernels, raising=False)
    monkeypatch.setattr(tk_linear, supports, lambda call, variant=None: SUPPORTED)
    monkeypatch.setattr(tk_linear, "load", lambda kernel, call, variant=None: SUPPORTED)
    return kernels
