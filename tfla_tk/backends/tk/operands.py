"""Tensors as kernels take them: addresses, strides, codes of dtypes; copies of what they cannot read."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tfla_tk.core.layout import MaybeTensor

Operand = tuple[int, int, int, int]  # address, strides of B, NH and S in elements
Gate = tuple[int, ...]  # the same of [B, NH, S], and the code of the dtype

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum class DType of params.h
ADDRESS_ALIGNMENT = 16  # bytes: of what TMA and vector loads read
_ROW_ALIGNMENT = 8  # elements: TMA needs rows that start at multiples of 16 bytes


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_stream(device: int) -> int:
    """The raw handle of the device's current stream."""
    return _raw_stream(device)


# not public: torch.cuda.current_stream wraps the handle in an object, which takes longer
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def pointer(x: Tensor | None) -> int:
    """Address of the data; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


def gate(x: Tensor) -> Gate:
    return x.data_ptr(), *x.stride(), DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Strides of B, NH and S for a TMA descriptor, or None where it cannot address the rows.

    The strides of dimensions of size 1 do not matter, but TMA wants multiples of 16 bytes there too.
    """
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    outer = tuple(
        stride if size > 1 else _ROW_ALIGNMENT for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )
    if any(stride <= 0 or stride % _ROW_ALIGNMENT for stride in outer):
        return None
    batch, head, row = outer
    return batch, head, row


def operand(x: Tensor) -> Operand | None:
    """Address of x [B, NH, S, D] and its strides for a TMA descriptor; None where it cannot address x."""
    pointer = x.data_ptr()
    strides = descriptor_strides(x.shape, x.stride())
    return None if strides is None or pointer % ADDRESS_ALIGNMENT else (pointer, *strides)


def as_operand(x: Tensor) -> Tensor:
    """x [B, NH, S, D] as it lies where a TMA descriptor can address it, else a copy."""
    return _dense(x) if operand(x) is None else x


def as_state(x: MaybeTensor) -> MaybeTensor:
    """x as it lies where it is contiguous and vector loads can take it, else a copy."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ADDRESS_ALIGNMENT == 0):
        return x
    return _dense(x)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class Operands:
    """The tensors of a call as its kernels take them: as they lie if that is possible, else copied.

    It keeps what it allocates, so that nothing else takes that memory before the last kernel is launched.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._results: list[tuple[Tensor, Tensor]] = []

    def read(self, x: Tensor) -> Operand:
        """x [B, NH, S, D]."""
        found = operand(x)
        return self._operand_of(_dense(x)) if found is None else found

    def write(self, result: Tensor) -> Operand:
        """A result [B, NH, S, D] to be written."""
        found = operand(result)
        return self._operand_of(self._in_place_of(result)) if found is None else found

    def state(self, x: Tensor | None) -> int:
        """Address of x, contiguous and where 16-byte loads can take it; 0 for None."""
        readable = as_state(x)
        if readable is not None and readable is not x:
            self._copies.append(readable)
        return pointer(readable)

    def state_result(self, result: Tensor | None) -> Tensor | None:
        """A state to be written, contiguous."""
        return result if result is None or result.is_contiguous() else self._in_place_of(result)

    def offsets(self, cu_seqlens: Tensor | None, batch: int) -> tuple[int, bool, int]:
        """cu_seqlens: address or 0, whether 64-bit, number of sequences."""
        if cu_seqlens is None:
            return 0, False, batch
        contiguous = cu_seqlens.contiguous()
        self._copies.append(contiguous)
        return contiguous.data_ptr(), contiguous.dtype == torch.int64, contiguous.shape[0] - 1

    def copy_back(self) -> None:
        """After the last launch: fill the results that no kernel could write as they lie."""
        for result, written in self._results:
            result.copy_(written)

    def _operand_of(self, dense: Tensor) -> Operand:
        self._copies.append(dense)
        found = operand(dense)
        assert found is not None  # rows of multiples of 16 bytes
        return found

    def _in_place_of(self, result: Tensor) -> Tensor:
        written = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        self._results.append((result, written))
        return written
