"""Inputs of the delta rule, gradients of a call, and a stand-in for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tfla_tk import reference
from tfla_tk.core.layout import Kept
from tfla_tk.ops import delta_rule as ops

Inputs = dict[str, Any]
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


def draw(
    *, batch: int = 2, seq: int = 40, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float64, rows: int | None = None,
) -> Inputs:  # fmt: skip
    """q, k of norm 1, v, g, beta and initial_state."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate = (batch, seq, heads[1])
    found = {
        "q": normal(batch, seq, heads[0], dims[0]),
        "k": normalize(normal(batch, seq, heads[0], dims[0]), dim=-1),
        "v": normal(batch, seq, heads[1], dims[1]),
        "g": logsigmoid(normal(*gate)),
        "beta": torch.sigmoid(normal(*gate)),
        "initial_state": normal(batch if rows is None else rows, heads[1], *dims),
    }
    return {name: x.to(dtype) for name, x in found.items()}


def draw_raw(**options: Any) -> Inputs:
    """The same before norm, gate and sigmoid, with A_log and dt_bias."""
    x = draw(**options)
    heads = x["v"].shape[2]
    a_log, dt_bias = (torch.linspace(*ends, heads).to(x["q"].dtype) for ends in ((-1, 0.5), (0.5, -2)))
    return x | {"k": 3 * x["k"], "g": 4 * x["g"] + 2, "A_log": a_log, "dt_bias": dt_bias}


def from_raw(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    """The recurrence of what the flags make of raw inputs: all of FLAGS."""
    g = reference.delta_log_decay(g, options.pop("A_log"), options.pop("dt_bias"))
    q, k = reference.l2_norm(q), reference.l2_norm(k)
    beta = reference.writing_strength(beta, True)
    return reference.gated_delta_rule_recurrent(q, k, v, g, beta, **options)


def leaves(inputs: Inputs) -> Inputs:
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}


def gradients(function: Callable[..., Any], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """o, the final state, and the gradients of a loss that reaches both."""
    x = leaves(inputs)
    o, last = function(**x, **options, output_final_state=True)
    generator = torch.Generator().manual_seed(7)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y.dtype)).sum() for y in (o, last))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(x.values()))
    return {"o": o.detach(), "last": last.detach(), **dict(zip(x, grads, strict=True))}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert actual[name].shape == want.shape, name
        error = (actual[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tol, (name, error)


class Kernels(ModuleType):
    """The kernels with the op's CPU code: None in place of empty tensors, and a log of the calls."""

    left = torch.arange(3.0)

    def __init__(self) -> None:
        super().__init__(ops.KERNELS)
        self.calls: list[str] = []
        self.core: Any = None
        self.needs_gates: list[bool] = []

    def forward(
        self, core: Any, *, output_final_state: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None, Kept | None]:
        self.calls.append("forward, kept" if keep else "forward")
        self.core = core
        o, last = ops._ops._fwd_cpu(*core, output_final_state)
        kept = Kept((self.left.clone(), None), "a layout") if keep else None
        return o, last if output_final_state else None, kept

    def backward(
        self, core: Any, kept: Kept | None, final_state: Any, do: Tensor, dht: Any, *, needs_gates: bool
    ) -> tuple[Tensor | None, ...]:
        if kept is not None:
            assert torch.equal(kept.tensors[0], self.left) and kept.tensors[1] is None
            assert kept.layout == "a layout"
        self.calls.append("backward" if kept is None else "backward, kept")
        self.needs_gates.append(needs_gates)
        *inputs, scale, l2norm, sigmoid, negative, schedule = core
        found = ops._ops._bwd_cpu(
            *inputs, final_state, do, dht, scale, l2norm, sigmoid, negative, schedule, needs_gates
        )
        return tuple(None if x.numel() == 0 else x for x in found)
