"""Random inputs of the comparison: the same values for every backend, whatever the memory layout."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

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
    normal = _normal(device, seed)
    rows = (shape.B, shape.H, shape.T)
    found = {
        name: _ordered(normal(*rows, dim, dtype=dtype), layout)
        for name, dim in (("q", shape.K), ("k", shape.K), ("v", shape.V))
    }
    found |= {"i": normal(*rows), "f": normal(*rows) + forget_bias}
    return found | packed_offsets(shape, device, seed)


def linear_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "bnsd",
    seed: int = 0,
    forget_bias: float = FORGET_BIAS,
    *,
    decay: Literal["head", "channel"] | None = None,
    gate_parameters: bool = False,
    beta: bool = False,
    raw: bool = False,
) -> dict[str, Tensor]:
    """Inputs of one call of an operator with FLA's signature: q, k, v ~ N(0, 1), and its gates.

    Args:
        dtype: of q, k, v; the gates are fp32.
        layout: "bnsd", the default: these operators have one memory order, contiguous as they take tensors.
        seed: equal seeds give equal values on one device.
        decay: None without g. "head": g = logsigmoid(N(0, 1) + forget_bias) [B, T, HV]. "channel": the same
            [B, T, HV, K].
        gate_parameters: g = N(0, 1) + FORGET_BIAS - forget_bias, and A_log [HV] and dt_bias [HV] or [HV K],
            of which the operator makes the decay -e^A_log softplus(g + dt_bias) as models begin with: e^A_log
            from 1 to 16, softplus(dt_bias) from 0.001 to 0.1.
        beta: of the delta rule: q and k of norm 1, and beta = sigmoid(N(0, 1)) [B, T, HV].
        raw: q and k as they are drawn, and beta before the sigmoid.

    Returns:
        q, k [B, T, H, K], v [B, T, HV, V], g, beta, A_log, dt_bias in the order of the functions' arguments,
        and cu_seqlens where sequences are packed.
    """
    if layout != LAYOUTS[0]:
        raise ValueError(f"layout: expected {LAYOUTS[0]}, [B, T, H, D] has no other here; got {layout!r}")
    normal, more = _normal(device, seed), _normal(device, seed + 1)
    rows = (shape.B, shape.T, shape.value_heads)
    found = {name: normal(shape.B, shape.T, shape.H, shape.K, dtype=dtype) for name in "qk"}
    found["v"] = normal(*rows, shape.V, dtype=dtype)
    channels = (shape.K,) if decay == "channel" else ()
    if decay is not None and not gate_parameters:
        found["g"] = logsigmoid((more if channels else normal)(*rows, *channels) + forget_bias)
    parameters = {}
    if gate_parameters:
        generator = torch.Generator(device).manual_seed(seed + 2)
        g = torch.randn((*rows, *channels), generator=generator, device=device)
        rate = torch.rand(shape.value_heads, generator=generator, device=device)
        step = torch.rand(math.prod((shape.value_heads, *channels)), generator=generator, device=device)
        step = 0.001 * 100**step
        found["g"] = g + FORGET_BIAS - forget_bias
        parameters = {"A_log": torch.log(1 + 15 * rate), "dt_bias": step + torch.log(-torch.expm1(-step))}
    if beta:
        found["beta"] = more(*rows) if raw else torch.sigmoid(more(*rows))
        if not raw:
            found |= {name: normalize(found[name].float(), dim=-1).to(dtype) for name in "qk"}
    return found | parameters | packed_offsets(shape, device, seed)


delta_rule_inputs = partial(linear_inputs, decay="head", beta=True)  # of the gated one


def packed_offsets(shape: Shape, device: torch.device, seed: int) -> dict[str, Tensor]:
    """cu_seqlens [N + 1] int32 of the packed sequences under its name; nothing where none are packed."""
    if shape.N is None:
        return {}
    ends = torch.tensor([0, *shape.lengths(seed)], dtype=torch.int64).cumsum(0)
    return {OFFSETS: ends.to(device=device, dtype=torch.int32)}


def draw_steps(
    sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shape: Shape, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """N(0, 1) for T steps [B, ..., T, ...], those of a step contiguous, of sizes [heads, ...] and dtypes."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn((shape.T, shape.B, *size), generator=generator, dtype=dtype, device=device).movedim(
            0, 2
        )
        for name, (size, dtype) in sizes.items()
    }


_made: dict[Any, tuple[Tensor, ...]] = {}


def made_once(make: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What is made of the states of T steps, dimension 2 of tensors, each contiguous, on the first call with
    these tensors. The memory of what was made of others is given back."""
    key = make, *((x.data_ptr(), x.shape, x.dtype) for x in tensors)
    if key not in _made:
        forget()
        _made[key] = tuple(make(x.movedim(2, 0)).movedim(0, 2) for x in tensors)
    return _made[key]


forget = _made.clear


def cotangent_like(output: Tensor, seed: int) -> Tensor:
    """A random gradient of the output, N(0, 1), in its dtype and memory order."""
    return torch.empty_like(output).copy_(_normal(output.device, seed)(*output.shape, dtype=output.dtype))


def _normal(device: torch.device, seed: int) -> partial[Tensor]:
    """A function of sizes whose results follow one another in one random sequence."""
    return partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device)


def _ordered(tensor: Tensor, layout: str) -> Tensor:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    return tensor if layout == "bnsd" else tensor.transpose(1, 2).contiguous().transpose(1, 2)
