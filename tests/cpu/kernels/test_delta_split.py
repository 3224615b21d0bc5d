"""The split of the delta rule's walks, emulated: what segments make of the state, what walks that begin ahead
of their segments leave out, and what rounding costs.

Both walks by chunks of one head as the kernels have them (kernels/delta_rule/bindings/params.h), in fp64, or
with operands of the GEMMs rounded to bf16, sums and states in fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tfla_tk.core.layout import CHUNK

from .delta_before_walks import FORGOTTEN, lead_of

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
        grown = (1 - beta * k.square().sum(1)).abs().clamp(min=1).log2()
        decay = g / math.log(2)
        # log2 of what is let through at most, by all of the chunk and by any stretch of it
        self.bound, self.stretch = (grown + decay).sum(), (grown + decay.clamp(min=0)).sum()


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
        return self.joined(forward, mirror)

    @staticmethod
    def joined(
        forward: list[tuple[Tensor, Tensor]], mirror: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        """The results of a sequence of those of its segments."""
        return (
            torch.cat([o for o, _ in forward]),
            forward[-1][1],
            torch.cat([dv for dv, _ in mirror]),
            mirror[0][1],
        )

    def leads(self, length: int, whole: int) -> list[tuple[int, int]]:
        """Before each segment of so many chunks and behind it, multiples of `whole` but at the ends."""
        bounds = torch.stack([torch.stack([x.bound, x.stretch]) for x in self.chunks]).double()
        cuts = range(0, len(bounds) + length, length)
        pairs = itertools.pairwise(min(at, len(bounds)) for at in cuts)

        def of_segment(number: int) -> float:
            return float(bounds[number * length : (number + 1) * length, 1].sum())

        return [
            (
                lead_of(bounds[:first].flip(0), of_segment(number), whole),
                lead_of(bounds[last:], of_segment(number), whole),
            )
            for number, (first, last) in enumerate(pairs)
            if first < last
        ]

    def led(self, initial: Tensor, d_last: Tensor, length: int, whole: int) -> tuple[Tensor, ...]:
        """The same by segments whose walks begin ahead of them, with zero where no end is reached."""
        forward, mirror, count = [], [], len(self.chunks)
        for number, (before, behind) in enumerate(self.leads(length, whole)):
            first, last = number * length, min((number + 1) * length, count)
            begin, end = first - before, last + behind
            state, d_state = (
                x.to(self.dtype) if is_reached else self.zeros()
                for x, is_reached in ((initial, begin == 0), (d_last, end == count))
            )
            o, state = self.forward(self.chunks[begin:last], state)
            dv, d_state = self.mirror(self.chunks[first:end], d_state)
            forward.append((o[before * CHUNK :], state))
            mirror.append((dv[: sum(len(x.q) for x in self.chunks[first:last])], d_state))
        return self.joined(forward, mirror)


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


# Walks that begin ahead of their segments. Decays: of the logistic ones of `draw`, so many times

LED = [(1500, 1.0, 1.0), (1500, 1.0, 2.0), (2500, 3.0, 1.0), (2500, 20.0, 2.0)]


@pytest.mark.parametrize(("tokens", "decay", "most"), LED)
def test_what_leads_leave_out_is_below_all_rounding(tokens: int, decay: float, most: float) -> None:
    """In fp64, though leads are no longer than they have to be."""
    walks = Walks(draw(tokens, decay, most), torch.float64, lambda x: x)
    found = walks.led(*states_of(1), 4, 1)
    assert max(errors(found, walks.whole(*states_of(1)))) < 1e-14
    before = [lead for lead, _ in walks.leads(4, 1)]
    assert before[0] == 0 and 0 < before[-1] < len(walks.chunks) - 4, "the ends are not reached from all"


def test_a_bound_holds() -> None:
    """What chunks let through of a state is no larger, also with a beta of more than two."""
    for decay, most in ((0.0, 1.0), (0.0, 2.5), (0.1, 2.5), (1.0, 1.0)):
        walks = Walks(draw(640, decay, most), torch.float64, lambda x: x)
        for x in walks.chunks:
            through = walks.forward([x], torch.eye(DIM, dtype=torch.float64), values=False)[1]
            norm = torch.linalg.matrix_norm(through, 2).log2()
            assert norm <= x.bound + 1e-9
            assert decay or (x.bound > 0) == (most > 2)


def test_leads_are_as_long_as_chunks_need_to_forget() -> None:
    """Of chunks that forget 30 bits each: with fewer chunks in between more than 2^-100 is let through."""
    assert -4 * 30 < FORGOTTEN < -3 * 30
    bounds = torch.tensor([[-30.0, 0.0]]).repeat(40, 1)
    assert [lead_of(bounds, 0, whole) for whole in (1, 3, 16)] == [4, 6, 16]
    assert [lead_of(bounds[:available], 0, 16) for available in (1, 3, 15, 16, 17)] == [1, 3, 15, 16, 16]
    assert lead_of(bounds, 31, 1) == 5  # what is left grows within the segment
    bounds[6, 1] = 90  # and so does what this chunk writes
    assert lead_of(bounds, 0, 1) == 7
    bounds[20] = 2000.0  # of which the chunks behind it do not make up
    assert lead_of(bounds, 0, 1) == 40
    bounds[21, 0] = -torch.inf
    assert lead_of(bounds, 0, 1) == 22
    bounds[30, 0] = torch.nan
    assert lead_of(bounds, 0, 1) == 40


@pytest.mark.parametrize(("tokens", "decay", "most"), LED)
def test_walks_with_leads_round_no_worse(tokens: int, decay: float, most: float) -> None:
    """In bf16, than walks that take the whole sequence."""
    call, ends = draw(tokens, decay, most), states_of(2)
    truth = Walks(call, torch.float64, lambda x: x).whole(*ends)
    walks = Walks(call, torch.float32, to_bf16)
    whole, led = errors(walks.whole(*ends), truth), errors(walks.led(*ends, 4, 1), truth)
    assert all(x < 1.01 * y + 1e-5 for x, y in zip(led, whole, strict=True)), (led, whole)
