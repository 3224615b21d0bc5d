"""The operators that the comparison knows: how to make inputs, call a backend and compute the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tfla_tk
from tfla_tk import reference

from .inputs import mlstm_inputs
from .shapes import Cost, Shape, cost

# |q.n| relative to its floor, closer to 1 than which a row is at the kink: ten times the error of q.n in bf16
KINK = 1e-3

MakeInputs = Callable[[Shape, torch.dtype, torch.device, str, int, float], dict[str, Tensor]]


@dataclass(frozen=True)
class Operator:
    """One operator of the comparison.

    Attributes:
        name: as it stands in a results row.
        function: the public function of tfla_tk, which takes `backend=`.
        options: its keyword arguments besides the inputs and the backend.
        inputs: makes the inputs, in the order of the function's parameters.
        truth: the reference's chunkwise form; it is called with fp64 inputs and `options`.
        at_kink: of the inputs in fp64, the rows [B, NH, S] where the gradient jumps and rounding decides it;
            None where it never does.
        forms: variants of the reference backend, all of which are compared where there is no GPU.
        baseline_omits_normaliser: the Triton backward leaves out the gradient through the normaliser; it can
            only be checked with an output gradient that is orthogonal to the output (see `accuracy`).
        baseline_tolerances: of the Triton kernel's h per dtype, where `accuracy.BASELINE_TOLERANCES` is not
            what it is judged by.
        runs_in_graphs: a CUDA graph is how it is used, so that its replay is timed whatever a call takes.
    """

    name: str
    function: str
    inputs: MakeInputs
    truth: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    at_kink: Callable[..., Tensor] | None = None
    forms: tuple[str, ...] = ("recurrent", "parallel", "chunkwise")
    baseline_omits_normaliser: bool = False
    baseline_tolerances: dict[str, float] = field(default_factory=dict)
    runs_in_graphs: bool = False

    def call(self, backend: str, *tensors: Tensor) -> Tensor:
        """The output of the public function on one backend, without states."""
        output: Tensor = getattr(tfla_tk, self.function)(*tensors, backend=backend, **self.options)
        return output

    def cost(self, shape: Shape, which: str, itemsize: int) -> Cost:
        """FLOP and minimum bytes of one call."""
        return cost(self.name, shape, which, itemsize)


def _normaliser_at_floor(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """Rows of mLSTMexp whose max(|s q.n|, e^-m) is of nearly equals."""
    # one column of v: it takes no part
    terms = reference.mlstm_forward_terms(q, k, v[..., :1], i, f)
    return (terms.d.abs() * terms.m_t.exp() - 1).abs() < KINK


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            "mlstm_exp",
            "mlstm_chunkwise",
            mlstm_inputs,
            reference.mlstm_chunkwise,
            at_kink=_normaliser_at_floor,
            baseline_omits_normaliser=True,
        ),
        Operator(
            "mlstm_sig",
            "mlstm_siging_chunkwise",
            mlstm_inputs,
            reference.mlstm_siging_chunkwise,
            options={"normalize": False},
        ),
    )
}
