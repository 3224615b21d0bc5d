"""Launches that are prepared once for all calls of a kind, and what calls of every family hand to them.

A prepared launch lacks nothing but where the tensors of a call begin (kernels/common/prepared_launches.h).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tfla_tk.backends.tk.operands import Gate, Operand, descriptor_strides
from tfla_tk.core.layout import ADDRESS_BITS, DTYPES, MaybeTensor

# what a launcher has prepared: all but the addresses at which the tensors of a call begin
Launch: TypeAlias = Any

NO_GATE: Gate = (0, 0, 0, 0, 0)
_SCRATCH_ALIGNMENT = 256  # bytes


class Addresses:
    """Numbers the tensors of a call, in the order in which a launch is told where they begin."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, *, given: bool = True) -> int:
        """The prepared address of the next tensor's first byte, to which bytes may be added; 0 for none."""
        self._count += 1
        return self._count << ADDRESS_BITS if given else 0


def number(core: Any) -> tuple[Any, Addresses]:
    """The prepared addresses of a call's tensors in the place of these, and what numbers further ones.

    Args:
        core: of a family, a NamedTuple whose last tensor is cu_seqlens.
    """
    addresses, count = Addresses(), core._fields.index("cu_seqlens") + 1
    at = [addresses.next(given=x is not None) for x in core[:count]]
    return core._make([*at, *core[count:]]), addresses


def aligned(size: int) -> int:
    """So many bytes, up to where the next place of an allocation begins."""
    return -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT


class Scratch:
    """Places in one allocation, of what kernels of a call leave for others.

    Attributes:
        bytes: of the allocation.
    """

    def __init__(self, address: int) -> None:
        """Args: address: the prepared one of the allocation."""
        self._address = address
        self.bytes = 0

    def take(self, size: int) -> int:
        """The prepared address of the next so many bytes; 0 for none."""
        at = self._address + self.bytes
        self.bytes += aligned(size)
        return at if size else 0

    def take_dense(self, size: tuple[int, ...], element_bytes: int) -> Operand:
        """The next place of a dense tensor [B, T, H, D]."""
        like = torch.empty(size, device="meta")
        return operand_at(self.take(like.numel() * element_bytes), like)


class Result(NamedTuple):
    """A result like an input, and what the kernels write: the same, or a dense tensor to be copied."""

    result: Tensor
    written: Tensor

    @staticmethod
    def like(x: Tensor, device: str | None = None) -> Result:
        """Uninitialised, like x [B, T, H, D] in memory order."""
        return Result.of(torch.empty_like(x, device=device))

    @staticmethod
    def of(result: Tensor) -> Result:
        """With itself, or a dense tensor, to be written."""
        if descriptor_strides(result.shape, result.stride()) is None:
            return Result(result, result.new_empty(result.shape))
        return Result(result, result)

    @staticmethod
    def of_state(result: Tensor) -> Result:
        """With itself where it is contiguous, or a contiguous tensor, to be written."""
        return Result(result, result if result.is_contiguous() else result.new_empty(result.shape))

    @property
    def is_direct(self) -> bool:
        """Whether the kernels write the result itself."""
        return self.written is self.result

    def filled(self) -> Tensor:
        """The result, once what is written is there."""
        return self.result if self.is_direct else self.result.copy_(self.written)


def are_same(tensors: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether they are the same objects: nothing had to be copied."""
    return all(x is y for x, y in zip(tensors, others, strict=True))


def starts(*tensors: MaybeTensor) -> list[int]:
    """Where the tensors of a call begin, in the order of their numbers; 0 for none."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def operand_at(address: int, x: Tensor) -> Operand:
    """x [B, T, H, D], which a TMA descriptor can address, at a prepared address."""
    strides = descriptor_strides(x.shape, x.stride())
    assert strides is not None
    batch, row, head = strides
    return address, batch, head, row


def gate_at(address: int, x: MaybeTensor) -> Gate:
    """x [B, T, HV] at a prepared address."""
    if x is None:
        return NO_GATE
    batch, row, head = x.stride()
    return address, batch, head, row, DTYPES[x.dtype]


def per_head_at(address: int, x: MaybeTensor, channels: int = 1) -> Gate:
    """x [HV channels] at a prepared address; channels of a head are its rows."""
    return NO_GATE if x is None else (address, 0, channels * x.stride(0), x.stride(0), DTYPES[x.dtype])
