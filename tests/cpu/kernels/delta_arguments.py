"""What a launch of the delta rule's kernels is given: its tensors at their addresses, the sequences that it
cuts, its chunks, and the matrices of a chunk by their definitions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla_tk.core.layout import ADDRESS_BITS, DELTA_SLICE_COLUMNS, DTYPES

from .addresses import CHUNK, sequences_of, tensor_at

OF_CODE = {code: dtype for dtype, code in DTYPES.items()}
GATES = ("g", "beta")
# of the modules' functions, as delta_rule/bindings and scalar_gate/bindings/backward.cpp name them
ARGUMENTS = {
    "matrices": ("shape", "q", "k", *GATES, "matrices", "scale", "bounds"),
    "leads": ("shape", "bounds", "leads", "longest", "both"),
    "forward": (
        *("shape", "q", "k", "v", "o", "writes", *GATES, "matrices"),
        *("initial", "last", "carried", "leads", "borders", "states", "scale"),
        *("walkers", "makers", "makes_matrices"),
    ),
    "maps": ("shape", "k", "v", *GATES, "a", "initial", "carried", "leads", "maps"),
    "carry": ("shape", "carried", "leads", "maps", "backward"),
    "mirror": (
        *("shape", "q", "k", "dout", "writes", "dv", *GATES, "matrices"),
        *("strengths", "d_last", "d_initial", "carried", "leads", "borders", "scale", "walkers"),
    ),
    "gradients": (
        *("shape", "q", "k", "dout", "writes", "dq", "dk", "turns", "dv", *GATES, "a", "states"),
        *("d_last", "d_initial", "carried", "leads", "strengths", "token_sums", "flows", "scale"),
    ),
    "decay": ("shape", "slots", "g", "dg", "token_sums", "flows"),
    "inputs": (
        *("shape", "q", "k", "unit_q", "unit_k", "beta", "g", "a_log", "dt_bias"),
        *("strength", "log_decay", "twice"),
    ),
    "inputs_backward": (
        *("shape", "q", "k", "dq", "dk", "beta", "g", "a_log", "dt_bias"),
        *("d_strength", "d_log_decay", "d_beta", "d_g", "sums", "twice"),
    ),
    "combine": ("shape", "dq_parts", "dk_parts", "dq", "dk", "of_floats"),
    "strength": ("shape", "sums", "parts", "dbeta"),
    "left": (
        *("shape", "q", "k", "writes", "dout", "dv", "dq", "left", "dk", *GATES),
        *("entering", "leaving", "borders", "sums", "written", "low", "scale", "shared"),
    ),
    "mlstm_bwd_gates": (
        *("q_dq", "k_dk", "anchors", "i", "f", "di", "df", "chunk_m", "initial", "last", "workspace"),
        *("offsets", "sizes", "sigmoid_gate", "device"),
    ),
}
ARGUMENTS["right"] = ARGUMENTS["left"]


class Arguments:
    """A launch and where the tensors of its call begin.

    Attributes:
        regions: prepared addresses of all that has been looked at, each with the address behind it.
    """

    def __init__(self, launch: SimpleNamespace, starts: list[int]) -> None:
        self.of, self._starts = launch, starts
        self.regions: set[tuple[int, int]] = set()
        if hasattr(launch, "shape"):
            self.cut = (self.address(launch.shape[0]), *launch.shape[1:5])
            self.batch, self.heads, self.seq, self.dim_k, self.dim_v, self.group, half, _ = launch.shape[5:]
            self.dtype = torch.float16 if half else torch.bfloat16

    def address(self, prepared: int) -> int:
        if prepared == 0:
            return 0
        return self._starts[(prepared >> ADDRESS_BITS) - 1] + (prepared & ((1 << ADDRESS_BITS) - 1))

    def tensor(self, at: int, dtype: torch.dtype, size: tuple[int, ...], *strides: int) -> Tensor:
        """What lies at a prepared address; contiguous without strides."""
        found = tensor_at(self.address(at), dtype, size, *strides)
        elements = 1 + sum((n - 1) * stride for n, stride in zip(found.shape, found.stride(), strict=True))
        self.regions.add((at, at + elements * dtype.itemsize))
        return found

    def operand(
        self, x: tuple[int, ...], dim: int, heads: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """[B, T, H, D], of the call's dtype or another."""
        at, batch, head, row = x
        heads = self.heads if heads is None else heads
        strides = (batch if self.batch > 1 else 0, row, head if heads > 1 else 0, 1)
        return self.tensor(at, dtype or self.dtype, (self.batch, self.seq, heads, dim), *strides)

    def keys(self, x: tuple[int, ...]) -> Tensor:
        """[B, T, HV, K] of a tensor whose heads are shared."""
        return self.rows(x).repeat_interleave(self.group, 2).float()

    def rows(self, x: tuple[int, ...]) -> Tensor:
        """[B, T, H, K] of a tensor whose heads are shared."""
        return self.operand(x, self.dim_k, self.heads // self.group)

    @functools.cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, g, beta of every head of v."""
        of = self.of
        return self.keys(of.q), self.keys(of.k), self.gate(of.g), self.gate(of.beta)

    @functools.cached_property
    def dout(self) -> Tensor:
        return self.operand(self.of.dout, self.dim_v).float()

    @property
    def is_wide(self) -> bool:
        return self.dim_k > 128

    @property
    def slices(self) -> int:
        """Of V in the walks for dq and dk."""
        return -(-self.dim_v // DELTA_SLICE_COLUMNS)

    def results(self, x: tuple[int, ...]) -> Tensor:
        """[B, T, HV, K]; fp32 where V has several slices."""
        return self.operand(x, self.dim_k, dtype=torch.float32 if self.slices > 1 else None)

    def kept_states(self, at: int) -> Tensor:
        """[B, HV, slots, V, K] of the states that enter chunks."""
        size = (self.batch, self.heads, self.slots, self.dim_v, self.dim_k)
        return self.tensor(at, self.dtype, size)

    def gate(self, x: tuple[int, ...]) -> Tensor:
        """[B, T, HV]; zeros without an address."""
        return self.written_gate(x).float() if x[0] else torch.zeros(self.batch, self.seq, self.heads)

    def written_gate(self, x: tuple[int, ...]) -> Tensor:
        """The same, in its own dtype and place."""
        at, batch, head, row, dtype = x
        size = (self.batch, self.seq, self.heads)
        return self.tensor(at, OF_CODE[dtype], size, batch, row, head)

    def of_heads(self, x: tuple[int, ...]) -> Tensor:
        """[HV]; zeros without an address."""
        at, _, head, _, dtype = x
        if at == 0:
            return torch.zeros(self.heads)
        return self.tensor(at, OF_CODE[dtype], (self.heads,), head).float()

    def tokens(self, at: int) -> Tensor:
        """fp32 [B, T, HV]."""
        return self.floats(at, self.batch, self.seq, self.heads)

    def floats(self, at: int, *size: int) -> Tensor:
        return self.tensor(at, torch.float32, size)

    def states(self, at: int, count: int) -> Tensor | None:
        return self.floats(at, count, self.heads, self.dim_k, self.dim_v) if at else None

    def maps(self, at: int) -> Tensor | None:
        """Of the segments of a split, at the slots of its states."""
        return self.floats(at, self.carried, self.heads, self.dim_k, self.dim_k) if at else None

    def bounds(self, at: int) -> Tensor:
        """[B, HV, slots, 4, 2] of the chunks: four parts, of all of a chunk and of any stretch of it."""
        return self.floats(at, self.batch, self.heads, self.slots, 4, 2)

    def leads(self, at: int) -> Tensor:
        """[segments, HV] of a split, before its segments or behind them."""
        return self.tensor(at, torch.int32, (self.cut[3], self.heads))

    @property
    def slots(self) -> int:
        """Of the matrices of a head."""
        return -(-self.seq // CHUNK) + (self.cut[2] if self.cut[0] else 0)

    @property
    def carried(self) -> int:
        """Slots of the states of a split."""
        return self.cut[3] - self.cut[2]


class Piece(NamedTuple):
    """A segment of a split: row of the batch, sequence, first token of this and the one behind its last, its
    own tokens, its number, how many the sequence has, and the slot of the state that enters the sequence's
    second segment."""

    row: int
    sequence: int
    start: int
    end: int
    tokens: range
    number: int
    count: int
    slot: int

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def begun(self) -> int:
        """Tokens of the sequence before it."""
        return self.tokens.start - self.start

    def slot_of(self, x: Arguments, token: int) -> int:
        """Of a chunk that begins with the token."""
        return (self.start // CHUNK + self.sequence if x.cut[0] else 0) + (token - self.start) // CHUNK

    @property
    def place(self) -> int:
        """Among the segments of all sequences, where its leads are."""
        return self.slot + self.sequence + self.number


def pieces_of(x: Arguments) -> Iterator[Piece]:
    """The segments of all sequences as a walk of the forward or the mirror is cut."""
    length = x.cut[4] * CHUNK
    for row, sequence, start, end in sequences_in(x):
        count = max(-(-(end - start) // length), 1)
        slot = start // length if x.cut[0] else sequence * (count - 1)
        for number in range(count):
            first = start + number * length
            tokens = range(first, min(first + length, end))
            yield Piece(row, sequence, start, end, tokens, number, count, slot)


def sequences_in(x: Arguments) -> Any:
    """Row of the batch, number, start and end of every sequence."""
    for sequence in sequences_of(x.cut, 1, x.seq):
        for row in range(sequence.batch):
            number = (sequence.which.start or 0) + row
            yield row, number, sequence.start, sequence.end


class ChunkOfSequence(NamedTuple):
    """Row of the batch, tokens, and slot of the matrices."""

    row: int
    tokens: slice
    slot: int


def chunks_of(x: Arguments) -> Iterator[ChunkOfSequence]:
    for row, sequence, start, end in sequences_in(x):
        first_slot = start // CHUNK + sequence if x.cut[0] else 0
        for number, first in enumerate(range(start, end, CHUNK)):
            yield ChunkOfSequence(row, slice(first, min(first + CHUNK, end)), first_slot + number)


def matrices_at(x: Arguments, addresses: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """A alone, or A and P, [HV, 64, 64] of every chunk, where they lie."""
    size = (x.batch, x.heads, x.slots, CHUNK, CHUNK)
    matrices = [x.tensor(at, x.dtype, size) for at in addresses]
    for chunk in chunks_of(x):
        yield tuple(y[chunk.row, :, chunk.slot] for y in matrices)


def matrices_of(x: Arguments) -> Iterator[tuple[Tensor, ...]]:
    """The same of q, k and the gates of a launch, by their definitions; zero past the last token."""
    of_q = hasattr(x.of, "q")
    k, gates = x.keys(x.of.k), (x.gate(x.of.g), x.gate(x.of.beta))
    q = x.keys(x.of.q) if of_q else k
    for row, tokens, _ in chunks_of(x):
        own_q, own_k = (y[row, tokens].transpose(0, 1) for y in (q, k))
        g, beta = (y[row, tokens].T for y in gates)
        b = g.cumsum(1)
        decays = torch.exp(b[:, :, None] - b[:, None]).tril()
        overlap = (decays * (own_k @ own_k.mT)).tril(-1)
        eye = torch.eye(overlap.shape[1])
        a = -torch.linalg.solve_triangular(eye + overlap * beta[:, None], overlap, upper=False)
        p = x.of.scale * decays * (own_q @ own_k.mT) if of_q else None
        lack = CHUNK - overlap.shape[1]
        yield tuple(torch.nn.functional.pad(y, (0, lack, 0, lack)) for y in (a, p) if y is not None)
