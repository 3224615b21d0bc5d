"""What rounding costs the forward at K = 256, whose state is fed with scaled values in place of scaled keys.

An emulation in fp64 of `mlstm_wide_state.cuh`: the state rounds what it is fed with and what is read of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tfla_tk.reference import mlstm_recurrent

CHUNK = 64
LANES = 8  # tokens whose roundings are independent: a lane has two of every eight, even and odd


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def scaled_keys(k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
    """What a chunk adds to C in the narrow kernels."""
    return bf16(k * weights[:, None]).T @ v


def scaled_values(k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
    """With values that are rounded one by one."""
    return k.T @ bf16(v * weights[:, None])


class GivenOn:
    """With values rounded together with what those of the tokens eight later have lost, where their weight is
    not far less: ScaledValues of `mlstm_wide_state.cuh`, every rounding of it.
    """

    LEAST = 1 / 16

    def __init__(self) -> None:
        self.lost: Tensor | float = 0.0  # negated
        self.giving = torch.full([LANES], torch.inf, dtype=torch.float64)  # weights of the tokens that gave

    def __call__(self, k: Tensor, v: Tensor, weights: Tensor, decay: Tensor) -> Tensor:
        self.lost, self.giving = bf16(self.lost * bf16(decay)), self.giving * decay
        high = bf16(weights)
        low = bf16(weights - high)
        rounded = torch.empty_like(v)
        for first in range(CHUNK - LANES, -1, -LANES):
            tokens = slice(first, first + LANES)
            take = weights[tokens] >= self.LEAST * self.giving
            rest = bf16(-self.lost * take[:, None] + bf16(v[tokens] * low[tokens, None]))
            rounded[tokens] = bf16(v[tokens] * high[tokens, None] + rest)
            self.lost = bf16(bf16(rounded[tokens] - v[tokens] * high[tokens, None]) - rest)
            self.giving = weights[tokens]
        return k.T @ rounded


def hidden(x: dict[str, Tensor], added: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """mLSTMexp of one head, [S, V], with the roundings of C, P and h, and of what `added` rounds."""
    scale, log2e = x["q"].shape[-1] ** -0.5, 1 / math.log(2)
    c = torch.zeros(x["q"].shape[-1], x["v"].shape[-1], dtype=torch.float64)
    n, m = torch.zeros_like(c[:, 0]), torch.tensor(0.0, dtype=torch.float64)
    found = []
    for start in range(0, x["q"].shape[0], CHUNK):
        q, k, v, i, f = (x[name][start : start + CHUNK] for name in "qkvif")
        b = torch.nn.functional.logsigmoid(f).cumsum(0) * log2e
        a = i * log2e - b
        row = a.cummax(0).values.maximum(m)
        p = ((q @ k.T) * scale * torch.exp2(a[None] - row[:, None]).nan_to_num(posinf=0.0)).tril()
        inter = scale * torch.exp2(m - row)
        weight = p.sum(1) + inter * (q @ n)
        w = weight.abs().maximum(torch.exp2(-(b + row)))[:, None]
        found.append(bf16(bf16(p / w) @ v + inter[:, None] / w * (q @ bf16(c))))
        decay, weights = torch.exp2(m - row[-1]), torch.exp2(a - row[-1])
        c = decay * c + added(k, v, weights, decay)
        n, m = decay * n + weights @ k, b[-1] + row[-1]
    return torch.cat(found)


def error(x: dict[str, Tensor], added: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> float:
    batched = {name: t[None, None] for name, t in x.items()}
    truth = mlstm_recurrent(**batched, eps=0.0)
    truth = (truth if isinstance(truth, Tensor) else truth[0])[0, 0]
    return float((hidden(x, added) - truth).norm() / truth.norm())


def draw(*, alike: bool = True, forget_bias: float = 3.0) -> dict[str, Tensor]:
    """Of one head. Keys are alike for all queries where no element of either is negative."""
    generator = torch.Generator().manual_seed(0)
    seq, dims = 512, {"q": 256, "k": 256, "v": 32}
    x = {name: bf16(torch.randn(seq, dim, generator=generator)) for name, dim in dims.items()}
    x |= {name: torch.randn(seq, generator=generator).double() for name in "if"}
    x["f"] += forget_bias
    if alike:
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    return x


def random() -> dict[str, Tensor]:
    return draw(alike=False)


def alike() -> dict[str, Tensor]:
    return draw()


def nothing_forgotten() -> dict[str, Tensor]:
    return draw(forget_bias=12.0)


def closed() -> dict[str, Tensor]:
    """What is read later is what was there when the input gates closed, in the middle of a chunk."""
    x = draw()
    x["i"][:236], x["i"][236:] = 80.0, -80.0
    return x


def large_keys(closed_by: float) -> dict[str, Tensor]:
    """One token of four has a key a hundred times as large, and its input gate makes up for it at least."""
    x = draw()
    large = torch.arange(len(x["i"])) * 7 % 11 < 3
    x["i"][large] -= closed_by
    x["k"][large] = bf16(100 * x["k"][large])
    return x


def masked() -> dict[str, Tensor]:
    return large_keys(1e4)


def made_up_for() -> dict[str, Tensor]:
    return large_keys(math.log(100))


@pytest.mark.parametrize("case", [random, alike, nothing_forgotten, closed, masked, made_up_for])
def test_scaled_values_are_as_good_as_scaled_keys(case: Callable[[], dict[str, Tensor]]) -> None:
    x = case()
    assert error(x, GivenOn()) <= 1.05 * error(x, scaled_keys)


@pytest.mark.parametrize("case", [nothing_forgotten, closed])
def test_values_rounded_one_by_one_are_not(case: Callable[[], dict[str, Tensor]]) -> None:
    """Keys that are alike let the errors of values add up where those of keys do not."""
    x = case()
    assert error(x, scaled_values) > 1.05 * error(x, scaled_keys)
