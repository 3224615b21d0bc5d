"""Puts something else in the place of the launchers and of the machine code that they launch.

What a kernel computes for a caller, the reference computes of the tensors at the addresses of its launch.
What kernels leave for each other has a mark in its place, which says what it is. A launch that looks in
another place, or too early, or after the place has got something else does not find it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tfla_tk import build
from tfla_tk.backends.tk import prepared
from tfla_tk.build import Instance, Launcher, all_instances
from tfla_tk.core.layout import ADDRESS_BITS, DTYPES

MEMORY_RATE = 3.35e6  # of an H100's memory, in bytes per microsecond
OF_CODE = {code: dtype for dtype, code in DTYPES.items()}


def launch_instead(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, *backends: ModuleType, stream: int = 7
) -> None:
    """Have these be launched, by `backends` on this stream of a GPU."""
    monkeypatch.setattr(build, "load", kernels.load)
    monkeypatch.setattr(build, "launches", kernels.in_order)
    pretend_a_gpu(monkeypatch, *backends, stream=stream)


def pretend_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *backends: ModuleType,
    stream: int = 7,
    multiprocessors: int = 132,
    memory_rate: float = MEMORY_RATE,
) -> None:
    """Have `backends` take this stream of a GPU, an H100 unless something else is said."""
    of_gpu = {"multiprocessors": multiprocessors, "current_stream": stream, "memory_rate": memory_rate}
    for name, found in of_gpu.items():
        for backend in backends:
            for attribute in {name, f"_{name}"} & vars(backend).keys():
                monkeypatch.setattr(backend, attribute, lambda device, found=found: found)


class Kernels:
    """Stands for all launchers: records what is launched, and computes it in a method `run_<launch>`.

    Attributes:
        ARGUMENTS: names of the arguments of each function that prepares a launch.
        SHAPE: makes names for what is in the argument `shape`.
        loaded: the machine code that was asked for.
        prepared: how many launches are.
        launches: what was launched: `name`, `stream`, and the arguments by their names, with addresses.
        computes: whether something is.
        guards: what lies behind tensors that were allocated since the last launch.
    """

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]] = {}
    SHAPE: ClassVar[Callable[..., Any] | None] = None

    def __init__(self) -> None:
        self.loaded: list[Instance] = []
        self.prepared = 0
        self.launches: list[SimpleNamespace] = []
        self.computes = True
        self.guards: list[Tensor] = []
        self._made_of: dict[int, tuple[Any, ...]] = {}

    def load(self, launcher: Launcher, *instances: Instance) -> Kernels:
        """For `build.load`."""
        assert set(instances) <= set(all_instances()), "machine code that no wheel has"
        self.loaded += (x for x in instances if x not in self.loaded)
        return self

    def __getattr__(self, name: str) -> Any:
        """A function that prepares a launch."""
        if name not in self.ARGUMENTS:
            raise AttributeError(name)

        def prepare(*arguments: Any) -> SimpleNamespace:
            self.prepared += 1
            return SimpleNamespace(name=name, **dict(zip(self.ARGUMENTS[name], arguments, strict=True)))

        return prepare

    def check_guards(self) -> None:
        assert all(bool(x.isnan().all()) for x in self.guards), "written behind the end of a tensor"
        self.guards.clear()

    def in_order(self, prepared: Iterable[SimpleNamespace]) -> Callable[[list[int], int], None]:
        """For `build.launches`."""
        in_order = list(prepared)

        def run(starts: list[int], stream: int) -> None:
            for launch in in_order:
                arguments = {name: placed(x, starts) for name, x in vars(launch).items()}
                if self.SHAPE is not None and "shape" in arguments:
                    arguments["shape"] = self.SHAPE(*arguments["shape"])
                self.launches.append(SimpleNamespace(**arguments, stream=stream))
                if self.computes:
                    getattr(self, f"run_{launch.name}")(self.launches[-1])
            self.check_guards()

        return run

    def names(self) -> list[str]:
        """What was launched since the last call."""
        found = [x.name for x in self.launches]
        self.launches.clear()
        return found

    # What launches leave for each other

    def leave(self, what: str, at: int, size: int, *made_of: Any) -> None:
        """Marks so many bytes at an address.

        Args:
            made_of: arguments that a launch that looks for it may have, too.
        """
        if size:
            assert at, f"{what} has no place"
            bytes_at(at, size).fill_(mark_of(what))
        self._made_of[at] = made_of

    def expect(self, what: str, at: int, size: int, *made_of: Any) -> None:
        """That they have this mark. With `made_of`, that it was made of the same."""
        if size:
            assert at and bool((bytes_at(at, size) == mark_of(what)).all()), f"no {what} at {at:x}"
        assert not made_of or self._made_of[at] == made_of, f"{what} is of something else"


def mark_of(what: str) -> int:
    """The byte; with this one everywhere 16-bit and 32-bit numbers are large, but finite."""
    return 0x41 + zlib.crc32(what.encode()) % 0x3B


def placed(x: Any, starts: list[int]) -> Any:
    """An argument of a prepared launch with addresses in place of the prepared ones, also in tuples."""
    if isinstance(x, tuple | list):
        return tuple(placed(each, starts) for each in x)
    if not isinstance(x, int) or x < 1 << ADDRESS_BITS:
        return x
    start = starts[(x >> ADDRESS_BITS) - 1]
    return start and start + x % (1 << ADDRESS_BITS)


@contextmanager
def watched_memory(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Notices what a launch reads that none has written, since PyTorch fills whatever it allocates with NaN.

    And what is written behind the end of an allocation, or to overlapping places in one, which lie closer.
    """
    new_empty = Tensor.new_empty

    def guarded(x: Tensor, *size: Any, **options: Any) -> Tensor:
        if torch.device(options.get("device") or x.device).type != "cpu":
            return new_empty(x, *size, **options)
        shape = size if isinstance(size[0], int) else size[0]
        count = math.prod(shape)
        whole = new_empty(x, 2 * count + 64, **options)
        kernels.guards.append(whole[count:])
        return whole[:count].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    monkeypatch.setattr(prepared, "_SCRATCH_ALIGNMENT", 16)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# What kernels see at the addresses that they are given


def tensor_at(pointer: int, dtype: torch.dtype, shape: Iterable[int], *strides: int) -> Tensor:
    """What lies at an address; contiguous without strides."""
    shape = tuple(shape)
    strides = strides or torch.empty(shape, device="meta").stride()
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def bytes_at(pointer: int, size: int) -> Tensor:
    return tensor_at(pointer, torch.uint8, (size,))


def floats_at(pointer: int, *shape: int) -> Tensor | None:
    """fp32, where vector loads can take it; None without an address."""
    assert pointer % 16 == 0
    return tensor_at(pointer, torch.float32, shape) if pointer else None


def operand_at(x: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Tensor:
    """[B, NH, S, D] of any strides of B, NH and S that TMA takes."""
    pointer, *strides = x
    assert pointer % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in strides)
    strides = [stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=False)]
    return tensor_at(pointer, dtype, shape, *strides, 1)


def gate_at(x: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """[B, NH, S], or [NH] with one stride."""
    pointer, *strides, code = x
    return tensor_at(pointer, OF_CODE[code], shape, *strides)


def offsets_at(cut: tuple[int, ...]) -> Tensor | None:
    """Of packed sequences: of a cut, which begins with their address, whether they are 64-bit and how many
    sequences there are."""
    pointer, is_64bit, count, *_ = cut
    return tensor_at(pointer, torch.int64 if is_64bit else torch.int32, (count + 1,)) if pointer else None


def bounds_of(cut: tuple[int, ...], seq: int) -> list[tuple[int, int, int]]:
    """Row of the batch, start and end of every sequence."""
    offsets = offsets_at(cut)
    if offsets is None:
        return [(row, 0, seq) for row in range(cut[2])]
    bounds = offsets.tolist()
    return [(0, start, end) for start, end in itertools.pairwise(bounds)]


def slots_of(cut: tuple[int, ...], seq: int, tokens: int) -> tuple[int, list[slice]]:
    """Of what there is once per so many tokens: how many there are in a row of the batch, and those of every
    sequence."""
    packed, bounds = cut[0] != 0, bounds_of(cut, seq)
    first = [start // tokens + number if packed else 0 for number, (_, start, _) in enumerate(bounds)]
    own = [slice(at, at - (start - end) // tokens) for at, (_, start, end) in zip(first, bounds, strict=True)]
    return -(-seq // tokens) + len(bounds) * packed, own


def at_odd_address(x: Tensor) -> Tensor:
    """x with its strides, one element further than vector loads can take it."""
    memory = torch.empty(x.untyped_storage().size() // x.itemsize + 9, dtype=x.dtype)
    first = next(n for n in range(1, 9) if memory[n:].data_ptr() % 16)
    return memory[first:].as_strided(x.shape, x.stride()).copy_(x)
