"""Tensors as kernels take them: addresses, strides, codes of dtypes; copies of what they cannot read."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla_tk.core.layout import DTYPES, MaybeTensor

Operand = tuple[int, int, int, int]  # address, strides of B, NH and S in elements
Gate = tuple[int, ...]  # the same of [B, NH, S], and the code of the dtype

_RATE_OF_AN_H100 = 3.35e6  # bytes per microsecond
ADDRESS_ALIGNMENT = 16  # bytes: of what TMA and vector loads read
_ROW_ALIGNMENT = 8  # elements: TMA needs rows that start at multiples of 16 bytes


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def memory_rate(device: int) -> float:
    """What the device's memory gives at its peak, in bytes per microsecond."""
    found = torch.cuda.get_device_properties(device)
    # torch tells these since 2.10; a driver may not know them
    kilohertz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    # two words a clock
    return kilohertz * 2 * bits / 8e3 or _RATE_OF_AN_H100


def current_stream(device: int) -> int:
    return _raw_stream(device)


# not public: torch.cuda.current_stream wraps the handle in an object, which takes longer
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def gate(x: Tensor) -> Gate:
    return x.data_ptr(), *x.stride(), DTYPES[x.dtype]


@functools.lru_cache(maxsize=4096)
def descriptor_strides(shape: tuple[int, ...], of_x: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Strides of B, NH and S for a TMA descriptor, or None where it cannot address the rows. The strides
    of dimensions of size 1 do not matter, but TMA wants multiples of 16 bytes there too."""
    if shape[-1] > 1 and of_x[-1] != 1:
        return None
    outer = tuple(
        stride if size > 1 else _ROW_ALIGNMENT for size, stride in zip(shape[:-1], of_x[:-1], strict=True)
    )
    if any(stride <= 0 or stride % _ROW_ALIGNMENT for stride in outer):
        return None
    batch, head, row = outer
    return batch, head, row


def operand(x: Tensor) -> Operand | None:
    """Address of x [B, NH, S, D] and its strides for a TMA descriptor; None where it cannot address x."""
    pointer = x.data_ptr()
    found = descriptor_strides(x.shape, x.stride())
    return None if found is None or pointer % ADDRESS_ALIGNMENT else (pointer, *found)


def as_operand(x: Tensor) -> Tensor:
    """x [B, NH, S, D] as it lies where a TMA descriptor can address it, else a copy."""
    return _dense(x) if operand(x) is None else x


def as_state(x: MaybeTensor) -> MaybeTensor:
    """x as it lies where it is contiguous and vector loads can take it, else a copy."""
    if x is None or (x.is_contiguous() and x.data_ptr() % ADDRESS_ALIGNMENT == 0):
        return x
    return _dense(x)


def log_decay(core: Any) -> tuple[int, float]:
    """How the log decay of a `KDACore` or a `RecurrentCore` follows from g: LogDecay in
    kernels/sequence/log_decay.h, and its lower bound, 0 for none."""
    if not core.is_raw:
        return 0, 0.0
    return (1, 0.0) if core.lower_bound is None else (2, core.lower_bound)


def laid_out(q: Tensor, v: Tensor, cu_seqlens: MaybeTensor, *tensors: MaybeTensor) -> tuple[Any, ...]:
    """What launches depend on of all their tensors but for addresses: the device, sizes, strides and
    dtypes."""
    sizes = q.get_device(), q.shape, v.shape, None if cu_seqlens is None else cu_seqlens.shape
    return *sizes, *[None if x is None else (x.stride(), x.dtype) for x in tensors]


def strides(*tensors: MaybeTensor) -> tuple[Any, ...]:
    return tuple(None if x is None else x.stride() for x in tensors)


def _dense(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
