"""What kernels see at the addresses that they are given: tensors, and sequences in their segments."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tfla_tk.core.layout import ANCHOR_CHUNKS, STATE_CHUNKS

CHUNK = 64


def tensor_at(pointer: int, dtype: torch.dtype, shape: Items[int], *strides: int) -> Tensor:
    """What lies at an address, as a kernel sees it; contiguous without strides."""
    strides = strides or contiguous_strides(shape)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), strides)


def slices_of(launch: SimpleNamespace) -> tuple[int, int]:
    """Of the values' columns, in a walk: how wide one is, and how many there are."""
    return launch.slice, -(-launch.sizes[4] // launch.slice)


def contiguous_strides(shape: Items[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def states_at(
    pointers: Items[int], count: tuple[int, ...], launch: SimpleNamespace, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """c and n of a walk at these addresses, as many as `count`: of c, the columns of its share."""
    *_, dim_keys, dim_values = launch.sizes
    rows, own = (dim_keys, dim_values) if launch.gradient == 2 else (dim_values, dim_keys)
    whole = getattr(launch, "state_columns", own)
    c, n = pointers
    return (
        tensor_at(c, dtype, (*count, rows, own), *contiguous_strides((*count, rows, whole))) if c else None,
        tensor_at(n, dtype, (*count, dim_values)) if n else None,
    )


def boundary_slots(launch: SimpleNamespace) -> int:
    """Boundaries between segments, of all sequences and heads."""
    _, _, sequences, segments, _ = launch.cut
    return int((segments - sequences) * launch.sizes[1])


def bounds_at(offsets: tuple[int, ...], seq: int) -> list[tuple[int, int]]:
    """(start, end) of every packed sequence; of all sequences of a batch at once."""
    pointer, wide, count, *_ = offsets
    if pointer == 0:
        return [(0, seq)]
    cu_seqlens = tensor_at(pointer, torch.int64 if wide else torch.int32, (count + 1,))
    return list(itertools.pairwise(cu_seqlens.tolist()))


def chunk_slots(offsets: tuple[int, ...], seq: int) -> int:
    """Per head, of what there is once per chunk."""
    pointer, _, count, *_ = offsets
    return -(-seq // CHUNK) + (count if pointer else 0)


def state_slots(offsets: tuple[int, ...], seq: int) -> int:
    """The same of what there is once per STATE_CHUNKS chunks."""
    pointer, _, count, *_ = offsets
    return -(-seq // (CHUNK * STATE_CHUNKS)) + (count if pointer else 0)


def operand_at(operand: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    pointer, *strides = operand
    return tensor_at(pointer, torch.float64, shape, *strides, 1)


def gate_at(gate: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    pointer, *strides, _ = gate
    return tensor_at(pointer, torch.float64, size, *strides)


def sums_at(sums: tuple[int, ...], size: tuple[int, ...], slots: int) -> tuple[Tensor, Tensor]:
    """Row sums: of every token [count, B, NH, S], and of every chunk [count, B, NH, slots, 2]."""
    whole, inter, count = sums
    return (
        tensor_at(whole, torch.float64, (count, *size)),
        tensor_at(inter, torch.float64, (count, *size[:2], slots, 2)),
    )


def flows_at(pointer: int, parts: int, own: int, size: tuple[int, ...], slots: int) -> Tensor:
    """[B, NH, anchor slots, own]: the first parts from an address on, of so many."""
    shape = (*size, slots // ANCHOR_CHUNKS + 1)
    return tensor_at(pointer, torch.float64, (*shape, own), *contiguous_strides((*shape, parts)))


@dataclass(frozen=True)
class Sequence:
    """A packed sequence, or the sequences of a batch together.

    Attributes:
        which: of the states of all sequences.
        start, end: its tokens.
        slot: of its first chunk.
        state: slot of its first state for the backward.
        segments: the chunks of each.
        boundaries: its own of all.
        batch, heads: of what there is at a boundary.
    """

    which: slice
    start: int
    end: int
    slot: int
    state: int
    segments: list[range]
    boundaries: slice
    batch: int
    heads: int

    def tokens(self, chunk: int) -> slice:
        first = self.start + chunk * CHUNK
        return slice(first, min(first + CHUNK, self.end))

    def at(self, x: Tensor, boundary: int) -> Tensor:
        """The entries [N, NH, *] at the boundary before a segment, of x [slots, *]."""
        own = x.unflatten(0, (-1, self.heads))[self.boundaries]
        return own.unflatten(0, (self.batch, -1))[:, boundary - 1]


def sequences_of(cut: tuple[int, ...], heads: int, seq: int) -> list[Sequence]:
    """The sequences as the kernels see them."""
    pointer, _, count, _, chunks_of = cut
    packed = pointer != 0
    batch = 1 if packed else count
    found = []
    for number, (start, end) in enumerate(bounds_at(cut, seq)):
        chunks = -(-(end - start) // CHUNK)
        pieces = [range(at, min(at + chunks_of, chunks)) for at in range(0, max(chunks, 1), chunks_of)]
        first = start // (CHUNK * chunks_of) if packed else 0
        own = slice(first, first + batch * (len(pieces) - 1))
        which = slice(number, number + 1) if packed else slice(None)
        slot, state = (start // (CHUNK * n) + (number if packed else 0) for n in (1, STATE_CHUNKS))
        found.append(Sequence(which, start, end, slot, state, pieces, own, batch, heads))
    return found


def at_odd_address(x: Tensor) -> Tensor:
    """x with its strides, one element further than vector loads can take it."""
    memory = torch.empty(x.untyped_storage().size() // x.itemsize + 9, dtype=x.dtype)
    first = next(n for n in range(1, 9) if memory[n:].data_ptr() % 16)
    return memory[first:].as_strided(x.shape, x.stride()).copy_(x)
