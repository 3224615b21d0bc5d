"""Inputs and checks of KDA's tests on the GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import logsigmoid, pad, softplus

from tfla_tk import chunk_kda
from tfla_tk.core.layout import CHUNK

from .accuracy import GRADIENT_TOLERANCE
from .linear import Normal, Tensors, assert_accurate, check_forward, draw_operands, exact, train

MOST_TRAINED = (128, 128)  # head dims with gradients
GATES = [
    *("usual", "model's", "bounded", "0", "-1e-4", "-50", "-1e3", "-1e5", "-inf"),
    *("mixed", "by channel", "growing"),
]
PARAMETERS = ("A_log", "dt_bias")


def draw_gates(kind: str, normal: Normal, *shape: int) -> Tensor:
    chosen = normal.uniform(*shape)
    full = torch.full(shape, 0.0, device="cuda")
    if kind in ("0", "-1e-4", "-50", "-1e3", "-1e5", "-inf"):
        return full + float(kind)
    return {
        "usual": lambda: logsigmoid(normal(*shape) + 3),
        # as Kimi Linear's are at first: rates of 1 to 16, steps of 1e-3 to 0.1
        "model's": lambda: -torch.exp(math.log(16) * normal.uniform(shape[2], 1) - 4.6 * chosen - 2.3),
        "bounded": lambda: -5 * torch.sigmoid(2 * normal(*shape)),
        "mixed": lambda: (
            (-0.05 * normal.uniform(*shape))
            .where(chosen < 0.9, -1e3)
            .where(chosen > 0.05, -50.0)
            .where(chosen < 0.8, -1e5)
            .where(chosen > 0.3, 0.0)
        ),
        "by channel": lambda: full.new_tensor([0.0, -1e-4, -50.0, -1e3]).repeat(*shape[:3], shape[3] // 4),
        "growing": lambda: 0.01 * normal(*shape),
    }[kind]()


def draw(
    batch: int = 2,
    seq: int = 300,
    heads: int = 2,
    value_heads: int | None = None,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "usual",
    of_gates: torch.dtype = torch.float32,
    states: bool = True,
    sequences: int | None = None,
    seed: int = 0,
) -> Tensors:
    """q and k of norm 1, v, g, beta and, on request, an initial state, [B, T, H, D]."""
    normal = Normal(seed)
    value_heads = heads if value_heads is None else value_heads
    found = draw_operands(normal, batch, seq, heads, value_heads, dims, dtype, unit=True)
    found["g"] = draw_gates(gates, normal, batch, seq, value_heads, dims[0]).to(of_gates)
    found["beta"] = torch.sigmoid(normal(batch, seq, value_heads)).to(of_gates)
    if states:
        found["initial_state"] = normal(batch if sequences is None else sequences, value_heads, *dims)
    return found


def draw_raw(
    of_gates: torch.dtype, options: dict[str, Any], *, parameters: tuple[str, ...] = PARAMETERS, **sizes: Any
) -> Tensors:
    """q, k, g and beta as projections leave them, as far as the options are for that, and what makes the log
    decay of g."""
    x = draw(of_gates=of_gates, **sizes)
    normal, value_heads, dim_k = Normal(1), x["v"].shape[2], x["q"].shape[3]
    raw = {
        "use_qk_l2norm_in_kernel": ("q", "k"),
        "use_beta_sigmoid_in_kernel": ("beta",),
        "use_gate_in_kernel": ("g",),
    }
    for flag, names in raw.items():
        if options.get(flag):
            x |= {name: (3 * normal(*x[name].shape)).to(x[name].dtype) for name in names}
    made = {"A_log": math.log(16) * normal.uniform(value_heads), "dt_bias": normal(value_heads * dim_k) - 4}
    return x | {name: made[name] for name in parameters}


# of dg where most gates let hardly anything through: it is made of sums that cancel, of products in tf32
MADE_IN_TF32 = 5e-3
# of dA_log, in which a gate that lets hardly anything through weighs most, as softplus of it does
OF_PARAMETERS = 1e-2


def limits_of(x: Tensors) -> dict[str, float]:
    """Of the gradients of gates: those of 16 bits have their rounding, too."""
    dtypes = {name: {x["q"].dtype, x[name].dtype} & GRADIENT_TOLERANCE.keys() for name in ("g", "beta")}
    limits = {f"d{name}": max(GRADIENT_TOLERANCE[t][1] for t in found) for name, found in dtypes.items()}
    return limits | ({"dg": max(limits["dg"], MADE_IN_TF32)} if "A_log" in x else {})


def sizes_of_sums(x: Tensors, dg: Tensor, lower_bound: float | None) -> Tensors:
    """What the errors of dA_log and ddt_bias are relative to, from the true dg.

    Both are sums over tokens of which most cancels. The errors of the tokens of a chunk may have one sign, as
    dg is summed up over its later tokens; those of chunks and channels are independent. So it is the root of
    the sum of squares, over chunks and channels, of what the terms of a chunk come to where none cancel.
    """
    biased = x["g"].double()
    if "dt_bias" in x:
        biased = biased + x["dt_bias"].double().view(biased.shape[2:])
    of_rate = dg * (softplus(biased) / biased.sigmoid() if lower_bound is None else biased)

    def of_chunks(terms: Tensor) -> Tensor:
        rows = pad(terms.abs(), (0, 0, 0, 0, 0, -terms.shape[1] % CHUNK))
        return rows.unflatten(1, (-1, CHUNK)).sum(2)

    return {
        "dA_log": vector_norm(of_chunks(of_rate), dim=(0, 1, 3)),
        "ddt_bias": vector_norm(of_chunks(dg), dim=(0, 1)).flatten(),
    }


def check_gradients(x: Tensors, **options: Any) -> None:
    """Against the reference in fp64."""
    of_function = {"function": chunk_kda, **options}
    found, truth = train(x, **of_function), train(exact(x), "reference", **of_function)
    assert all(found[f"d{name}"].dtype == x[name].dtype for name in x if f"d{name}" in found)
    parameters = {f"d{name}" for name in PARAMETERS if name in x}
    of_tokens = [{name: y[name] for name in y if name not in parameters} for y in (found, truth)]
    limits = limits_of(x)
    assert_accurate(*of_tokens, x["q"].dtype, x["v"].numel() ** 0.5, limits)
    if not parameters:
        return
    sizes = sizes_of_sums(x, truth["dg"], options.get("lower_bound"))
    errors = {name: ((found[name] - truth[name]).norm() / sizes[name].norm()).item() for name in parameters}
    limit = max(limits["dg"], OF_PARAMETERS)
    # not(<=): NaN fails
    assert all(error <= limit for error in errors.values()), errors


def check(x: Tensors, function: Any = chunk_kda, **options: Any) -> None:
    """Forward and backward against the reference in fp64."""
    assert function is chunk_kda
    check_forward(x, chunk_kda, **options)
    check_gradients(x, **options)
