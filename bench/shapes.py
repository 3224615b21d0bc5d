"""Benchmark shapes, and the least work and traffic of each operator on them."""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from tfla_tk.core import flops

CHUNK = flops.CHUNK
PASSES = ("fwd", "fwdbwd")
PHASES = ("train", "prefill", "decode")  # of a whole model, in place of passes


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H heads, head dims K of q and k and V of v. N: sequences packed in a batch
    of one of T tokens in all; None where nothing is packed. HV: heads of v, a multiple of H, where they
    are more than those of q and k; None where they are H."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int | None = field(default=None, kw_only=True)
    HV: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            if value < 1:
                raise ValueError(f"shape {name}: expected a positive integer, got {value}")
        if self.HV == self.H:
            object.__setattr__(self, "HV", None)
        if self.value_heads % self.H:
            raise ValueError(f"shape HV: expected a multiple of H = {self.H}, got {self.HV}")
        if self.N is not None and self.B != 1:
            raise ValueError(f"shape N: expected a batch of one of packed sequences, got B = {self.B}")
        if self.N is not None and self.N > self.T:
            raise ValueError(f"shape N: expected at most one sequence per token of {self.T}, got {self.N}")

    def __str__(self) -> str:
        packed = "" if self.N is None else f" N{self.N}"
        return f"B{self.B} T{self.T}{packed} {self._heads()} {self.K}/{self.V}"

    def _heads(self) -> str:
        return f"H{self.H}" if self.HV is None else f"H{self.H} HV{self.HV}"

    @property
    def value_heads(self) -> int:
        """Heads of v: HV, or H."""
        return self.HV or self.H

    @property
    def group(self) -> int:
        """Heads of v per head of q and k."""
        return self.value_heads // self.H

    @property
    def head_tokens(self) -> int:
        """Tokens times heads of v: what the formulas per token and head are multiplied by."""
        return self.B * self.T * self.value_heads

    def as_dict(self) -> dict[str, int]:
        """The shape as it stands in a results row, without what is None."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def lengths(self, seed: int = 0) -> list[int]:
        """The lengths of the sequences: T of each, or N unequal ones of T tokens in all. Packed sequences
        have between a half and one and a half of the T / N tokens, but for rounding, and at least one
        token. Equal seeds give equal lengths on any machine."""
        if self.N is None:
            return [self.T] * self.B
        source = random.Random(seed)
        weights = [source.uniform(0.5, 1.5) for _ in range(self.N)]
        spare, total = self.T - self.N, sum(weights)
        ends, reached = [0], 0.0
        for weight in weights:
            reached += weight
            ends.append(round(spare * (reached / total)))
        ends[-1] = spare
        return [1 + end - start for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True)
class ModelShape(Shape):
    """The same through a model of so many layers and so wide an embedding; T tokens are new in each call."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"B{self.B} T{self.T}, {self.layers} layers of {self.width}, {self._heads()} {self.K}/{self.V}"


_SHAPE = re.compile(
    r"B?(\d+)x[TS]?(\d+)xH?(\d+)x(?:K?(\d+)xV?(\d+)|(\d+)/(\d+))((?:x(?:N|HV)\d+)*)", re.IGNORECASE
)


def _parse_shape(text: str) -> Shape | None:
    """The shape that a text such as 8x8192x16x128x256 describes; None where it describes none."""
    match = _SHAPE.fullmatch(text)
    if not match:
        return None
    *numbers, rest = match.groups()
    named = re.findall(r"x(N|HV)(\d+)", rest, re.IGNORECASE)
    more = {name.upper(): int(number) for name, number in named}
    if len(more) < len(named):
        raise ValueError(f"expected N and HV at most once each, got {text!r}")
    return Shape(*(int(number) for number in numbers if number is not None), **more)


SWEEP_TOKENS = 65536
# as the option --shapes takes them
_SETS: dict[str, str] = {
    "main": "8x8192x16x128x256 8x8192x8x256x512 32x2048x16x128x256 1x65536x16x128x256 1x8192x8x256x512",
    "sweep": " ".join(f"{SWEEP_TOKENS // 2**n}x{2**n}x16x128x256" for n in range(9, 17)),
    # more and narrower heads
    "heads": "8x8192x32x128x128 8x8192x64x64x64",
    # so short that launch and host time show
    "tiny": "1x512x4x64x64 1x1024x8x128x256",
    "small": "1x256x2x32x64 2x512x4x64x64 1x1000x2x64x128",
    # 1,000 and 32,000 sequences of about 10 tokens, 128 documents of about 512
    "packed": "1x10000x4x64x64xN1000 1x320000x4x64x64xN32000 1x65536x16x128x256xN128",
    # the scalar-decay family: simple GLA and RetNet, Lightning, small models, one long row, Mamba-2
    "scalar": "8x8192x16x128x256 8x8192x64x128x128 4x4096x16x128x128 1x65536x16x128x128 "
    "1x65536x16x128x128xN128 1x16384x8x128x64xHV128",
    # small models, the 1.3B's, few and narrow heads, 16 documents of about 2048 tokens
    "gla": "8x8192x16x128x256 8x8192x16x128x128 8x8192x4x256x512 4x4096x16x128x128 "
    "1x32768x16x128x128xN16 1x8192x16x128x128 4x4096x16x64x64",
    # DeltaNet and small gated models, Qwen3-Next and 3.5 (16/32, 16/48, 16/64), few long heads, narrow heads,
    # OLMo-hybrid, FLA's 1.3B, and packed documents of about 128, 1024 and 4096 tokens
    "delta": "8x8192x16x128x128 8x8192x16x128x256 1x8192x16x128x128xHV32 1x32768x16x128x128xHV32 "
    "1x32768x16x128x128xHV64 8x1024x16x128x128xHV32 4x4096x16x128x128xHV48 1x65536x16x128x128 "
    "4x4096x16x64x64 4x4096x30x96x192 4x4096x6x256x512 1x65536x16x128x128xN512xHV32 "
    "1x65536x16x128x128xN64xHV32 1x65536x16x128x128xN16xHV32",
    # small models, FlashKDA's own, one long row, Kimi Linear's heads, short rows, documents of about 4096
    "kda": "8x8192x16x128x128 1x8192x96x128x128 1x16384x16x128x128 1x8192x32x128x128 8x2048x32x128x128 "
    "1x65536x32x128x128xN16",
    # so short that the host's time shows
    "delta_host": "1x512x16x128x128xHV32 1x2048x16x128x128xHV32",
}
SETS: dict[str, tuple[Shape, ...]] = {
    name: tuple(shape for shape in map(_parse_shape, text.split()) if shape) for name, text in _SETS.items()
}
MAIN, SWEEP = SETS["main"], SETS["sweep"]


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Shapes of a comma-separated list such as "main,1x4096x8x64x128": keys of SETS, and B x T x H x K x
    V, behind them N of packed sequences and HV heads of v, as in 1x320000x4x64x64xN32000."""
    found: dict[Shape, None] = {}
    for item in (part.strip() for part in text.split(",")):
        shape = _parse_shape(item)
        if shape is None and item not in SETS:
            expected = f"one of {', '.join(SETS)} or BxTxHxKxV[xN..][xHV..]"
            raise ValueError(f"expected {expected}, got {item!r}")
        found.update(dict.fromkeys([shape] if shape else SETS[item]))
    return tuple(found)


class Cost(NamedTuple):
    """The least that a call must do. flops: multiplications and additions of the chunkwise form with fused
    chunks of CHUNK tokens. bytes: traffic with device memory."""

    flops: float
    bytes: float


def cost(op: str, shape: Shape, which: str, itemsize: int = 2) -> Cost:
    """The least work and traffic of one call. op: a name of COSTS. which: "fwd", or "fwdbwd" for the sum
    of forward and backward. itemsize: bytes per element of q, k, v."""
    parts = COSTS[op](shape, itemsize)[: {"fwd": 1, "fwdbwd": 2}[which]]
    flops_per_token, bytes_per_token = map(sum, zip(*parts, strict=True))
    return Cost(flops_per_token * shape.head_tokens, bytes_per_token * shape.head_tokens)


# forward and backward per token and head; one step of decoding has no backward
PerToken = Callable[[Shape, int], tuple[Cost, ...]]
FlopsOfDims = Callable[[int, int], int]


def _mlstm(shape: Shape, itemsize: int) -> tuple[Cost, ...]:
    """mLSTM: q, k, v, h and three fp32 gate values (i, f and m) once. The backward has two sweeps, dq
    forward in time, dk and dv backward in time, with no state in memory."""
    dims = itemsize * (shape.K + shape.V)
    forward = Cost(flops.forward(shape.K, shape.V), 2 * dims + 12)
    return forward, Cost(flops.backward(shape.K, shape.V), 5 * dims)


def _linear(
    gates: int,
    forward: FlopsOfDims = flops.forward,
    backward: FlopsOfDims = flops.backward,
    *,
    by_channel: bool = False,
) -> PerToken:
    """An operator with so many fp32 gates per token and head of v, and K more where they are by channel.
    Bytes: every input and every output once; forward q, k, v, the gates and o, backward q, k, v, the
    gates, do and the gradients of the inputs. q and k are read once per head of their own, however many
    heads of v share it, and so are the products that none of v enters (Q K^T, and in the backward dq and
    dk within a chunk) counted once."""

    def per_token(shape: Shape, itemsize: int) -> tuple[Cost, ...]:
        keys, values = shape.K / shape.group, shape.V
        numbers = gates + shape.K * by_channel
        shared = (1 - 1 / shape.group) * flops.intra_chunk(shape.K, 0)
        return Cost(forward(shape.K, shape.V) - shared, itemsize * 2 * (keys + values) + 4 * numbers), Cost(
            backward(shape.K, shape.V) - 3 * shared, itemsize * (4 * keys + 3 * values) + 8 * numbers
        )

    return per_token


def _mlstm_step(shape: Shape, itemsize: int) -> tuple[Cost, ...]:
    """One step of decoding: the state once in and once out, a token, two fp32 gates."""
    state = shape.K * (shape.V + 1) + 1
    return (Cost(flops.step(shape.K, shape.V), 2 * itemsize * (state + shape.K + shape.V) + 8),)


def _linear_step(gates: int, *, by_channel: bool = False) -> PerToken:
    """One step of a linear operator: an fp32 state once in and once out, a token, so many fp32 gates, and K
    more where they are by channel."""

    def per_token(shape: Shape, itemsize: int) -> tuple[Cost, ...]:
        token = 2 * itemsize * (shape.K / shape.group + shape.V)
        numbers = 2 * shape.K * shape.V + gates + by_channel * shape.K
        return (Cost(flops.step(shape.K, shape.V), token + 4 * numbers),)

    return per_token


COSTS: dict[str, PerToken] = {
    **dict.fromkeys(("mlstm_exp", "mlstm_sig"), _mlstm),
    "simple_gla": _linear(1),
    # a log decay per head
    **dict.fromkeys(("retention", "lightning"), _linear(0)),
    "gla": _linear(0, backward=flops.gla_backward, by_channel=True),
    # beta; g and beta
    "delta_rule": _linear(1, flops.delta_rule, flops.delta_rule_backward),
    "gated_delta_rule": _linear(2, flops.delta_rule, flops.delta_rule_backward),
    "kda": _linear(1, flops.delta_rule, flops.delta_rule_backward, by_channel=True),
    "mlstm_step": _mlstm_step,
    **dict.fromkeys(("simple_gla_step", "delta_rule_step"), _linear_step(1)),
    "gla_step": _linear_step(0, by_channel=True),
    "gated_delta_rule_step": _linear_step(2),
    "kda_step": _linear_step(1, by_channel=True),
}
