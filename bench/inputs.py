"""Random inputs of the comparison: the same values for every backend, whatever the memory layout.

What makes the inputs of an operator takes the shape, the dtype of q, k, v (gates are fp32), the device, the
memory order of q, k, v, one of LAYOUTS, a seed (equal seeds give equal values on one device) and the mean of
what the forget gates are made of, at which the state remembers; at 12 they forget nothing.
"""

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from .shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("bnsd", "bsnd")  # contiguous [B, NH, S, K]; a transposed [B, S, NH, K], as models pass it
FORGET_BIAS = 3.0
Named = Mapping[str, Tensor]
OFFSETS = "cu_seqlens"  # among the inputs: of packed sequences, not differentiated


def mlstm_inputs(
    shape: Shape, dtype: torch.dtype, device: torch.device, layout: str, seed: int, forget_bias: float
) -> dict[str, Tensor]:
    """q, k [B, NH, S, K], v [B, NH, S, V], i, f [B, NH, S] of one mLSTM call, N(0, 1), and f + forget_bias;
    and cu_seqlens where sequences are packed."""
    normal = normal_draws(device, seed)
    rows = (shape.B, shape.H, shape.T)
    dims = {"q": shape.K, "k": shape.K, "v": shape.V}
    found = {name: normal(*rows, dim, dtype=dtype) for name, dim in dims.items()}
    if layout != LAYOUTS[0]:
        found = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in found.items()}
    found |= {"i": normal(*rows), "f": normal(*rows) + forget_bias}
    return found | packed_offsets(shape, device, seed)


def linear_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    layout: str,
    seed: int,
    forget_bias: float,
    *,
    decay: Literal["head", "channel"] | None = None,
    gate_parameters: bool = False,
    beta: bool = False,
    raw: bool = False,
) -> dict[str, Tensor]:
    """Inputs of one call of an operator with FLA's signature: q, k, v ~ N(0, 1), contiguous whatever the
    layout, and its gates.

    Args:
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
    normal, more, others = (normal_draws(device, seed + offset) for offset in range(3))
    rows = (shape.B, shape.T, shape.value_heads)
    found = {name: normal(shape.B, shape.T, shape.H, shape.K, dtype=dtype) for name in "qk"}
    found["v"] = normal(*rows, shape.V, dtype=dtype)
    channels = (shape.K,) if decay == "channel" else ()
    parameters = {}
    if gate_parameters:
        found["g"] = others(*rows, *channels) + FORGET_BIAS - forget_bias
        uniform = partial(torch.rand, generator=others.keywords["generator"], device=device)
        parameters["A_log"] = torch.log(1 + 15 * uniform(shape.value_heads))
        step = 0.001 * 100 ** uniform(math.prod((shape.value_heads, *channels)))
        parameters["dt_bias"] = step + torch.log(-torch.expm1(-step))
    elif decay is not None:
        found["g"] = logsigmoid((more if channels else normal)(*rows, *channels) + forget_bias)
    if beta:
        found["beta"] = more(*rows) if raw else torch.sigmoid(more(*rows))
        if not raw:
            found |= {name: normalize(found[name].float(), dim=-1).to(dtype) for name in "qk"}
    return found | parameters | packed_offsets(shape, device, seed)


# of the gated one
delta_rule_inputs = partial(linear_inputs, layout=LAYOUTS[0], seed=0, decay="head", beta=True)


def packed_offsets(shape: Shape, device: torch.device, seed: int) -> dict[str, Tensor]:
    """cu_seqlens [N + 1] int32 of the packed sequences under its name; nothing where none are packed."""
    if shape.N is None:
        return {}
    ends = torch.tensor([0, *shape.lengths(seed)], dtype=torch.int64).cumsum(0)
    return {OFFSETS: ends.to(device=device, dtype=torch.int32)}


Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # [heads, ...] and dtype of tensors


def draw_steps(sizes: Sizes, shape: Shape, device: torch.device, seed: int) -> dict[str, Tensor]:
    """N(0, 1) for T steps [B, ..., T, ...], those of a step contiguous."""
    normal = normal_draws(device, seed)
    drawn = {name: normal(shape.T, shape.B, *size, dtype=dtype) for name, (size, dtype) in sizes.items()}
    return {name: x.movedim(0, 2) for name, x in drawn.items()}


@functools.lru_cache(maxsize=4)
def made_once(make: Callable[[Tensor], Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What is made of the states of T steps, dimension 2 of tensors, each contiguous, on the first call with
    these tensors. Two variants of a contest take it, in their checks and in the timed rounds: four in all."""
    return tuple(make(x.movedim(2, 0)).movedim(0, 2) for x in tensors)


def cotangent_like(output: Tensor, seed: int) -> Tensor:
    """A random gradient of the output, N(0, 1), in its dtype and memory order."""
    return torch.empty_like(output).copy_(
        normal_draws(output.device, seed)(*output.shape, dtype=output.dtype)
    )


def normal_draws(device: torch.device, seed: int) -> partial[Tensor]:
    """A function of sizes whose results follow one another in one random sequence."""
    return partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device)
