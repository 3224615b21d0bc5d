"""Benchmark shapes, and the least work and traffic of each operator on them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tfla_tk.core import flops

CHUNK = flops.CHUNK
PASSES = ("fwd", "fwdbwd")
PHASES = ("train", "prefill", "decode")  # of a whole model, in place of passes


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H heads, head dims K of q and k and V of v."""

    B: int
    T: int
    H: int
    K: int
    V: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"shape {name}: expected a positive integer, got {value}")

    def __str__(self) -> str:
        return f"B{self.B} T{self.T} H{self.H} {self.K}/{self.V}"

    @property
    def head_tokens(self) -> int:
        """Tokens times heads: what the formulas per token and head are multiplied by."""
        return self.B * self.T * self.H

    def as_dict(self) -> dict[str, int]:
        """The shape as it stands in a results row."""
        return asdict(self)


@dataclass(frozen=True)
class ModelShape(Shape):
    """The same through a model of so many layers and so wide an embedding; T tokens are new in each call."""

    layers: int
    width: int

    def __str__(self) -> str:
        return f"B{self.B} T{self.T}, {self.layers} layers of {self.width}, H{self.H} {self.K}/{self.V}"


MAIN = (
    Shape(8, 8192, 16, 128, 256),
    Shape(8, 8192, 8, 256, 512),
    Shape(32, 2048, 16, 128, 256),
    Shape(1, 65536, 16, 128, 256),
    Shape(1, 8192, 8, 256, 512),
)
SWEEP_TOKENS = 65536
SWEEP = tuple(Shape(SWEEP_TOKENS // length, length, 16, 128, 256) for length in (2**n for n in range(9, 17)))
SMALL = (
    Shape(1, 256, 2, 32, 64),
    Shape(2, 512, 4, 64, 64),
    Shape(1, 1000, 2, 64, 128),
)
# more and narrower heads
HEADS = (
    Shape(8, 8192, 32, 128, 128),
    Shape(8, 8192, 64, 64, 64),
)
# so short that launch and host time show
TINY = (
    Shape(1, 512, 4, 64, 64),
    Shape(1, 1024, 8, 128, 256),
)
SETS: dict[str, tuple[Shape, ...]] = {
    "main": MAIN,
    "sweep": SWEEP,
    "heads": HEADS,
    "tiny": TINY,
    "small": SMALL,
}

_SHAPE = re.compile(r"B?(\d+)x[TS]?(\d+)xH?(\d+)x(?:K?(\d+)xV?(\d+)|(\d+)/(\d+))", re.IGNORECASE)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Shapes of a comma-separated list of sets (the keys of SETS) and of shapes such as 8x8192x16x128x256.

    Args:
        text: for example "main" or "1x4096x8x64x128,small"; the numbers are B x T x H x K x V.

    Raises:
        ValueError: neither a set nor a shape.
    """
    found: dict[Shape, None] = {}
    for item in (part.strip() for part in text.split(",")):
        match = _SHAPE.fullmatch(item)
        if item in SETS:
            found.update(dict.fromkeys(SETS[item]))
        elif match:
            found[Shape(*(int(number) for number in match.groups() if number is not None))] = None
        else:
            raise ValueError(f"shapes: expected one of {', '.join(SETS)} or BxTxHxKxV, got {item!r}")
    return tuple(found)


@dataclass(frozen=True)
class Cost:
    """The least that a call must do.

    Attributes:
        flops: multiplications and additions of the chunkwise form with fused chunks of CHUNK tokens.
        bytes: traffic with device memory.
    """

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def cost(op: str, shape: Shape, which: str, itemsize: int = 2) -> Cost:
    """The least work and traffic of one call.

    Args:
        op: a name of COSTS.
        which: "fwd", or "fwdbwd" for the sum of forward and backward.
        itemsize: bytes per element of q, k, v.

    Raises:
        ValueError: no formula stands for the operator, or it has no such pass.
    """
    if op not in COSTS:
        raise ValueError(f"op: expected one of {', '.join(COSTS)}, got {op!r}")
    if which not in PASSES:
        raise ValueError(f"pass: expected one of {', '.join(PASSES)}, got {which!r}")
    forward, backward = COSTS[op](shape, itemsize)
    if which == "fwd":
        each = forward
    elif backward is not None:
        each = forward + backward
    else:
        raise ValueError(f"pass: {op} has no backward, got {which!r}")
    return Cost(each.flops * shape.head_tokens, each.bytes * shape.head_tokens)


# forward and backward per token and head; None where there is no backward
PerToken = Callable[[Shape, int], tuple[Cost, Cost | None]]


def _scalar_decay(numbers: int) -> PerToken:
    """Formulas per token and head of mLSTM and of the scalar-decay family.

    Forward, fused: q, k, v, h once, and `numbers` fp32 gate values. Backward: two sweeps, dq forward in
    time, dk and dv backward in time, with no state in memory.
    """

    def per_token(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        dims = itemsize * (shape.K + shape.V)
        forward = Cost(flops.forward(shape.K, shape.V), 2 * dims + 4 * numbers)
        return forward, Cost(flops.backward(shape.K, shape.V), 5 * dims)

    return per_token


def _gla(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    """Formulas per token and head of GLA, its gate per key channel in q's dtype.

    Backward: q, k, g, v, do and the gradients of the four inputs once.
    """
    intra = flops.intra_chunk(shape.K, shape.V)
    state = shape.K * shape.V
    forward = Cost(intra + 4 * state, itemsize * (3 * shape.K + 2 * shape.V))
    return forward, Cost(3 * intra + 8 * state, itemsize * (6 * shape.K + 3 * shape.V))


def _intra(shape: Shape, itemsize: int) -> tuple[Cost, None]:
    """Formulas per token and head of the mLSTM's intra-chunk part with the whole sequence as one chunk.

    FLOP: the CHUNK x CHUNK tiles of Q K^T, and their products with V, at or below the diagonal. Bytes: q, k,
    v, h and two fp32 gates once.
    """
    rows = -(-shape.T // CHUNK)
    tiles = rows * (rows + 1) // 2
    dims = shape.K + shape.V
    return Cost(tiles * 2 * CHUNK**2 * dims / shape.T, 2 * itemsize * dims + 8), None


def _step(shape: Shape, itemsize: int) -> tuple[Cost, None]:
    """Formulas per head and step of decoding: the state once in and once out, a token, two fp32 gates."""
    state = shape.K * (shape.V + 1) + 1
    return Cost(flops.step(shape.K, shape.V), 2 * itemsize * (state + shape.K + shape.V) + 8), None


# three numbers: i, f and m; one: the log decay of the token; none: one decay per head
COSTS: dict[str, PerToken] = {
    "mlstm_exp": _scalar_decay(3),
    "mlstm_sig": _scalar_decay(3),
    "mlstm_intra": _intra,
    "mlstm_step": _step,
    "simple_gla": _scalar_decay(1),
    "retention": _scalar_decay(0),
    "gla": _gla,
}
