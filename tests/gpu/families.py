"""Calls of every family alike: all tensors [B, T, H, D] and [B, H, ..], outputs and gradients by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import tfla_tk

from .accuracy import DEVICE
from .linear import Normal, Tensors, draw_operands

HEADS = 2
STATES = ("c_initial", "n_initial", "m_initial", "initial_state")
GIVEN = ("do", "dlast")  # gradients of the output and of the last state
RAW = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "use_gate_in_kernel")


@dataclass(frozen=True)
class Case:
    """A function, its head dims, and the inputs beside q, k, v that it takes.

    Attributes:
        group: heads of v that share one of q and k.
        flags: that make inputs of raw ones.
        normalize: of mLSTM with the sigmoid gate.
        form: the kernels' way that a test forces, of the fixture `take_form`.
    """

    function: str
    dims: tuple[int, int]
    gates: tuple[str, ...] = ()
    states: tuple[str, ...] = ("initial_state",)
    trains: bool = True
    group: int = 1
    flags: tuple[str, ...] = ()
    normalize: bool = True
    form: str = ""

    @property
    def is_mlstm(self) -> bool:
        return self.function.startswith("mlstm")

    @property
    def forward(self) -> Case:
        """Without gradients."""
        return replace(self, trains=False)

    @property
    def options(self) -> dict[str, Any]:
        """The flags, and the parameters of a gate that is made in the kernels, without gradients: these are
        sums over all sequences."""
        found: dict[str, Any] = dict.fromkeys(self.flags, True)
        if not self.normalize:
            found["normalize"] = False
        if "use_gate_in_kernel" in self.flags:
            heads = HEADS * self.group
            channels = math.prod(self.channels("g"))
            found["A_log"] = torch.linspace(-1.0, 0.5, heads, device=DEVICE)
            found["dt_bias"] = torch.linspace(0.5, -2.0, heads * channels, device=DEVICE)
        return found

    def channels(self, gate: str) -> tuple[int, ...]:
        """The dims of a gate behind tokens and heads."""
        return self.dims[:1] if gate == "g" and self.function in ("chunk_gla", "chunk_kda") else ()


def mlstm(gate: str, *dims: int, **fields: Any) -> Case:
    """With the gate "exp", "sig", or "sig_unnormalised"."""
    function = "mlstm_chunkwise" if gate == "exp" else "mlstm_siging_chunkwise"
    states = STATES[: {"exp": 3, "sig": 2, "sig_unnormalised": 1}[gate]]
    return Case(function, dims, ("i", "f"), states, normalize=gate != "sig_unnormalised", **fields)


def simple_gla(*dims: int, **fields: Any) -> Case:
    return Case("chunk_simple_gla", dims, ("g",), **fields)


def gla(*dims: int, **fields: Any) -> Case:
    return Case("chunk_gla", dims, ("g",), **fields)


def delta(*dims: int, **fields: Any) -> Case:
    return Case("chunk_delta_rule", dims, ("beta",), **fields)


def gated_delta(*dims: int, **fields: Any) -> Case:
    return Case("chunk_gated_delta_rule", dims, ("g", "beta"), **fields)


def kda(*dims: int, **fields: Any) -> Case:
    return Case("chunk_kda", dims, ("g", "beta"), **fields)


def draw(case: Case, batch: int, seq: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Inputs [B, T, H, D] and [B, H, ..], and do and dlast."""
    normal, heads, (dim_k, dim_v) = Normal(seed), HEADS * case.group, case.dims
    unit = "beta" in case.gates and not case.flags
    x = draw_operands(normal, batch, seq, HEADS, heads, case.dims, dtype, unit=unit)
    for name in case.gates:
        gate = normal(batch, seq, heads, *case.channels(name))
        made = {"i": gate, "f": gate + 3, "g": logsigmoid(gate + 3), "beta": torch.sigmoid(gate)}
        x[name] = gate if case.flags == RAW else made[name]
    for name in case.states:
        shape = {"n_initial": (dim_k,), "m_initial": (1,)}.get(name, case.dims)
        x[name] = normal(batch, heads, *shape)
    x["do"] = normal(batch, seq, heads, dim_v).to(dtype)
    x["dlast"] = normal(batch, heads, dim_k, dim_v)
    return x


def draw_packed(
    case: Case, lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensors, Tensor]:
    """Packed sequences of these lengths, and their offsets."""
    return pack([draw(case, 1, length, 100 * seed + n, dtype) for n, length in enumerate(lengths)])


def compute(
    case: Case,
    x: Tensors,
    offsets: Tensor | None = None,
    *,
    compiled: bool = False,
    fixed: tuple[str, ...] = (),
) -> Tensors:
    """Outputs and gradients by name, like x: [B, T, ..] of tokens, [N, ..] of states.

    Args:
        fixed: inputs that have no gradient.
    """
    given, x = [x[name] for name in GIVEN], {name: t for name, t in x.items() if name not in GIVEN}
    fixed = ("m_initial", *fixed)
    leaves = {name: t.detach().requires_grad_(case.trains and name not in fixed) for name, t in x.items()}
    inputs = {
        name: t.transpose(1, 2) if case.is_mlstm and name not in STATES else t for name, t in leaves.items()
    }
    options: dict[str, Any] = {"cu_seqlens": offsets, "backend": "tk", **case.options}
    function = getattr(tfla_tk, case.function)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    if case.is_mlstm:
        h, last = function(**inputs, **options, return_last_states=True)
        outputs = {"o": h.transpose(1, 2), **dict(zip(("last", "n", "m"), last, strict=False))}
    else:
        o, last = function(**inputs, **options, output_final_state=True)
        outputs = {"o": o, "last": last}
    found = {name: t.detach() for name, t in outputs.items()}
    if case.trains:
        names = [name for name, t in leaves.items() if t.requires_grad]
        grads = torch.autograd.grad([outputs["o"], outputs["last"]], [leaves[name] for name in names], given)
        found |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    return found


def is_of_states(name: str) -> bool:
    return name in ("last", "n", "m", "dlast") or name.removeprefix("d") in STATES


def pack(parts: list[Tensors]) -> tuple[Tensors, Tensor]:
    """Batches one behind the other in one batch of one, and the offsets."""
    lengths = [part["q"].shape[1] for part in parts for _ in range(part["q"].shape[0])]
    x = {
        name: torch.cat([part[name] if is_of_states(name) else part[name].flatten(0, 1) for part in parts])
        for name in parts[0]
    }
    x = {name: t if is_of_states(name) else t[None] for name, t in x.items()}
    return x, torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
