"""The split of the delta rule's walks, emulated: what segments make of the state, and what rounding costs.

Both walks by chunks of one head as the kernels have them (kernels/delta_rule/bindings/params.h), in fp64, or
with operands of the GEMMs rounded to bf16, sums and states in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tfla_tk.core.layout import CHUNK

DIM = 128
SCALE = DIM**-0.5
Round = Callable[[Tensor], Tensor]


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class Call(NamedTuple):
    """Of one head: [T, K] and [T, V]; log decay and beta [T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    g: Tensor
    beta: Tensor


def draw(tokens: int, decay: float, most: float = 1.0, seed: int = 0) -> Call:
    """Of operands that bf16 holds, in fp64; most: the largest beta."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (to_bf16(torch.nn.functional.normalize(normal(tokens, DIM), dim=-1)) for _ in range(2))
    v, do = (to_bf16(normal(tokens, DIM)) for _ in range(2))
    g = decay * torch.nn.functional.logsigmoid(normal(tokens) + 2)
    return Call(q, k, v, do, g, most * torch.sigmoid(normal(tokens)))


class Chunk:
    """Of a call from one token on, with its matrices, rounded."""

    def __init__(self, call: Call, first: int, dtype: torch.dtype, rounded: Round) -> None:
        q, k, v, do, g, beta = (x[first : first + CHUNK].to(dtype) for x in call)
        b = g.cumsum(0)
        decays = torch.exp(b[:, None] - b).tril()
        overlap, eye = (decays * (k @ k.mT)).tril(-1), torch.eye(len(q), dtype=dtype)
        p = SCALE * decays * (q @ k.mT)
        self.q, self.k, self.v, self.do, self.beta = q, k, v, do, beta[:, None]
        self.read, self.kept, self.whole = b.exp()[:, None], (b[-1] - b).exp()[:, None], b[-1].exp()
        self.a = rounded(-torch.linalg.solve_triangular(eye + overlap * beta, overlap, upper=False))
        self.p = rounded(p)


class Walks:
    """Of a call.

    Args:
        dtype, rounded: of sums and states, and what is done to operands of GEMMs.
    """

    def __init__(self, call: Call, dtype: torch.dtype, rounded: Round) -> None:
        self.dtype, self.rounded = dtype, rounded
        self.chunks = [Chunk(call, at, dtype, rounded) for at in range(0, len(call.q), CHUNK)]

    def zeros(self) -> Tensor:
        return torch.zeros(DIM, DIM, dtype=self.dtype)

    def forward(self, chunks: list[Chunk], state: Tensor, *, values: bool = True) -> tuple[Tensor, Tensor]:
        """O and the last state; without values, a state of the map."""
        outputs, r = [], self.rounded
        for x in chunks:
            read = r(state)
            w = (x.v if values else 0) - x.read * (x.k @ read)
            writes = w + x.a @ r(x.beta * w)
            outputs.append(SCALE * x.read * (x.q @ read) + x.p @ r(x.beta * writes))
            state = x.whole * state + x.k.mT @ r(x.beta * x.kept * writes)
        return torch.cat(outputs), state

    def mirror(self, chunks: list[Chunk], state: Tensor) -> tuple[Tensor, Tensor]:
        """dV and the gradient of the first state."""
        gradients, r = [], self.rounded
        for x in reversed(chunks):
            du = x.p.mT @ x.do + x.kept * (x.k @ r(state))
            dy = du + x.a.mT @ r(x.beta * du)
            gradients.append(x.beta * dy)
            state = x.whole * state + x.q.mT @ r(SCALE * x.read * x.do) - x.k.mT @ r(x.read * x.beta * dy)
        return torch.cat(gradients[::-1]), state

    def whole(self, initial: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
        """O, the last state, dV, the gradient of the initial state."""
        return (
            *self.forward(self.chunks, initial.to(self.dtype)),
            *self.mirror(self.chunks, d_last.to(self.dtype)),
        )

    def split(self, initial: Tensor, d_last: Tensor, length: int) -> tuple[Tensor, ...]:
        """The same by segments of so many chunks, whose states are carried."""
        pieces = [self.chunks[at : at + length] for at in range(0, len(self.chunks), length)]
        eye = torch.eye(DIM, dtype=self.dtype)
        maps = [self.forward(piece, eye, values=False)[1] for piece in pieces]
        states = [initial.to(self.dtype)]
        for number, piece in enumerate(pieces[:-1]):
            own = self.forward(piece, self.zeros() if number else states[0])[1]
            states.append(own + maps[number] @ states[-1] if number else own)
        d_states = [d_last.to(self.dtype)]
        for number, piece in reversed(list(enumerate(pieces))[1:]):
            at_end = number == len(pieces) - 1
            own = self.mirror(piece, d_states[0] if at_end else self.zeros())[1]
            d_states.append(own if at_end else own + maps[number].mT @ d_states[-1])
        forward = [self.forward(*x) for x in zip(pieces, states, strict=True)]
        mirror = [self.mirror(*x) for x in zip(pieces, reversed(d_states), strict=True)]
        return (
            torch.cat([o for o, _ in forward]),
            forward[-1][1],
            torch.cat([dv for dv, _ in mirror]),
            mirror[0][1],
        )


def errors(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]


def states_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, last = (torch.randn(DIM, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return first, last


@pytest.mark.parametrize("most", [1.0, 2.0])
@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0])
def test_the_maps_of_segments_are_exact(decay: float, most: float) -> None:
    walks = Walks(draw(1000, decay, most), torch.float64, lambda x: x)
    truth = walks.whole(*states_of(1))
    assert max(errors(walks.split(*states_of(1), 4), truth)) < 1e-10


CASES = [(2000, 1.0, 1.0), (4096, 1e-3, 1.0), (4096, 0.0, 2.0), (16384, 0.0, 1.0)]


def rounded(tokens: int, decay: float, most: float) -> tuple[list[float], list[float]]:
    """Errors in bf16 of walks that take the whole sequence, and of a split."""
    call, ends = draw(tokens, decay, most), states_of(2)
    truth = Walks(call, torch.float64, lambda x: x).whole(*ends)
    walks = Walks(call, torch.float32, to_bf16)
    return errors(walks.whole(*ends), truth), errors(walks.split(*ends, 16), truth)


@pytest.mark.parametrize(("tokens", "decay", "most"), CASES)
def test_a_split_rounds_no_worse(tokens: int, decay: float, most: float) -> None:
    """In bf16, than walks that take the whole sequence; and it is within the tolerances."""
    whole, split = rounded(tokens, decay, most)
    assert all(x < 1.1 * y + 2e-4 for x, y in zip(split, whole, strict=True)), (split, whole)
    o, last, dv, _ = split
    assert o < 5e-3 and last < 5e-3 and dv < 8e-3
