"""What GPU tests share: names, lengths, draws, layouts of the operands, NaN in what is not written, and one
launch of a kernel of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk.prepared import current_stream
from tfla_tk.core.layout import ADDRESS_BITS

OPERANDS = ("q", "k", "v")
TOKENS = (*OPERANDS, "i", "f")  # what has a token axis
LENGTHS = [200, 0, 1, 64, 63, 65, 0, 450, 128]  # of packed sequences: empty ones, and about chunks of 64


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Drawn on the GPU, the same for equal arguments."""
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype, device="cuda")


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(x: Tensor) -> Tensor:
    """Rows that start 2 bytes off the alignment of TMA."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
    return wide[..., 1 : x.shape[-1] + 1].copy_(x)


def odd_rows(x: Tensor) -> Tensor:
    """Rows whose stride is no multiple of 16 bytes."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


def shifted_transposed(x: Tensor) -> Tensor:
    return shifted(x.transpose(1, 2)).transpose(1, 2)


def head_last(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def fuse(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Slices of one tensor in their last dimension, as a projection to all of them leaves them."""
    joint = torch.cat([*x.values()], dim=-1)
    return dict(zip(x, joint.split([t.shape[-1] for t in x.values()], dim=-1), strict=True))


def relayout(x: dict[str, Tensor], layout: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: layout(t) if name in OPERANDS else t for name, t in x.items()}


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """PyTorch fills whatever it allocates with NaN: an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def high_and_low(x: Tensor) -> Tensor:
    """[..., 2] in fp32: what kernels take for numbers in fp64, whose sum it is."""
    high = x.float()
    return torch.stack([high, (x - high).float()], dim=-1)


_LEAST_ADDRESS = 2**32  # sizes and strides of these tests are below it


def launch(kernel: ModuleType, name: str, *arguments: Any, device: int) -> None:
    """A function of a backward's launcher, prepared and launched on the current stream.

    Args:
        arguments: of the function up to the device, with addresses in place of prepared ones.
    """
    starts: list[int] = []

    def prepared(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(prepared, x))
        if not isinstance(x, int) or x < _LEAST_ADDRESS:
            return x
        starts.append(x)
        return len(starts) << ADDRESS_BITS

    found = getattr(kernel, name)(*map(prepared, arguments), device)
    build.launches([found])(starts, current_stream(device))


def offsets_of(cu_seqlens: Tensor | None, batch: int) -> tuple[int, bool, int]:
    """Address of contiguous offsets or 0, whether they are 64-bit, number of sequences."""
    if cu_seqlens is None:
        return 0, False, batch
    assert cu_seqlens.is_contiguous()
    return cu_seqlens.data_ptr(), cu_seqlens.dtype == torch.int64, cu_seqlens.shape[0] - 1
