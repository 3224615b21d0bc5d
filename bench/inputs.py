"""Random inputs of the comparison: the same values for every backend, whatever the memory layout."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("bnsd", "bsnd")
FORGET_BIAS = 3.0
OFFSETS = "cu_seqlens"  # among the inputs: of packed sequences, not differentiated


def mlstm_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
) -> dict[str, Tensor]:
    """q, k, v, i, f of one mLSTM call, N(0, 1), and f + forget_bias so that the state remembers.

    Args:
        dtype: of q, k, v; the gates are fp32.
        layout: memory order of q, k, v: "bnsd" contiguous, "bsnd" a transposed [B, S, NH, D] as models pass.
        seed: equal seeds give equal values on one device, in either layout.
        forget_bias: mean of f; at 12 the gates forget nothing.

    Returns:
        q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S], and cu_seqlens where sequences are packed.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (shape.B, shape.H, shape.T)
    found = {
        name: _ordered(torch.randn(*rows, dim, generator=generator, dtype=dtype, device=device), layout)
        for name, dim in (("q", shape.K), ("k", shape.K), ("v", shape.V))
    }
    found["i"] = torch.randn(rows, generator=generator, device=device)
    found["f"] = torch.randn(rows, generator=generator, device=device) + forget_bias
    return found | packed_offsets(shape, device, seed)


def scalar_decay_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
    *,
    gated: bool = True,
) -> dict[str, Tensor]:
    """q, k, v, N(0, 1), and g = logsigmoid(N(0, 1) + forget_bias) of one call of the scalar-decay family.

    Args:
        dtype: of q, k, v; g is fp32.
        layout: "bnsd", the default: the operator has one memory order, contiguous as it takes the tensors.
        seed: equal seeds give equal values on one device.
        gated: with g; the decay of retention and Lightning is no input.

    Returns:
        q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV], and cu_seqlens where sequences are packed.

    Raises:
        ValueError: another layout.
    """
    if layout != LAYOUTS[0]:
        raise ValueError(f"layout: expected {LAYOUTS[0]}, [B, T, H, D] has no other here; got {layout!r}")
    generator = torch.Generator(device).manual_seed(seed)
    found = {
        name: torch.randn(shape.B, shape.T, heads, dim, generator=generator, dtype=dtype, device=device)
        for name, heads, dim in (
            ("q", shape.H, shape.K),
            ("k", shape.H, shape.K),
            ("v", shape.value_heads, shape.V),
        )
    }
    if gated:
        raw = torch.randn(shape.B, shape.T, shape.value_heads, generator=generator, device=device)
        found["g"] = torch.nn.functional.logsigmoid(raw + forget_bias)
    return found | packed_offsets(shape, device, seed)


def gla_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
) -> dict[str, Tensor]:
    """q, k, v as of the scalar decay, and g = logsigmoid(N(0, 1) + forget_bias) of every key channel.

    Returns:
        q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] in fp32, and cu_seqlens where sequences are packed.

    Raises:
        ValueError: another layout.
    """
    found = scalar_decay_inputs(shape, dtype, device, layout, seed, gated=False)
    generator = torch.Generator(device).manual_seed(seed + 1)
    raw = torch.randn(shape.B, shape.T, shape.H, shape.K, generator=generator, device=device)
    return found | {"g": torch.nn.functional.logsigmoid(raw + forget_bias)}


def delta_rule_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
    *,
    gated: bool = True,
    raw: bool = False,
) -> dict[str, Tensor]:
    """q and k of norm 1, v, g as of the scalar decay, and beta = sigmoid(N(0, 1)) of one call.

    Args:
        gated: with g. raw: q and k as they are drawn, and beta before the sigmoid.
        others: as of `scalar_decay_inputs`.

    Returns:
        q, k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV] in fp32, and cu_seqlens where sequences are
        packed.

    Raises:
        ValueError: another layout.
    """
    found = scalar_decay_inputs(shape, dtype, device, layout, seed, forget_bias, gated=gated)
    generator = torch.Generator(device).manual_seed(seed + 1)
    beta = torch.randn(shape.B, shape.T, shape.value_heads, generator=generator, device=device)
    if raw:
        return found | {"beta": beta}
    unit = {name: torch.nn.functional.normalize(found[name].float(), dim=-1).to(dtype) for name in "qk"}
    return found | unit | {"beta": torch.sigmoid(beta)}


def gate_parameter_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
) -> dict[str, Tensor]:
    """Raw inputs of the delta rule whose log decay is -e^A_log softplus(g + dt_bias), as models begin with.

    Returns:
        as `delta_rule_inputs` with raw, but g = N(0, 1) + FORGET_BIAS - forget_bias, and A_log, dt_bias [HV]
        in fp32: e^A_log from 1 to 16, and softplus(dt_bias) from 0.001 to 0.1.

    Raises:
        ValueError: another layout.
    """
    found = delta_rule_inputs(shape, dtype, device, layout, seed, forget_bias, raw=True)
    generator = torch.Generator(device).manual_seed(seed + 2)
    heads = shape.value_heads
    g = torch.randn(shape.B, shape.T, heads, generator=generator, device=device)
    rate, step = torch.rand(2, heads, generator=generator, device=device)
    step = 0.001 * 100**step
    parameters = {"A_log": torch.log(1 + 15 * rate), "dt_bias": step + torch.log(-torch.expm1(-step))}
    return found | {"g": g + FORGET_BIAS - forget_bias} | parameters


def packed_offsets(shape: Shape, device: torch.device, seed: int) -> dict[str, Tensor]:
    """cu_seqlens [N + 1] int32 of the packed sequences under its name; nothing where none are packed."""
    if shape.N is None:
        return {}
    ends = torch.tensor([0, *shape.lengths(seed)], dtype=torch.int64).cumsum(0)
    return {OFFSETS: ends.to(device=device, dtype=torch.int32)}


def cotangent_like(output: Tensor, seed: int) -> Tensor:
    """A random gradient of the output, N(0, 1), in its dtype and memory order."""
    generator = torch.Generator(output.device).manual_seed(seed)
    values = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    return torch.empty_like(output).copy_(values)


def _ordered(tensor: Tensor, layout: str) -> Tensor:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    return tensor if layout == "bnsd" else tensor.transpose(1, 2).contiguous().transpose(1, 2)
