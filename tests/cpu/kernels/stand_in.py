"""Puts something else in the place of the launchers and of the machine code that they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tfla_tk import build
from tfla_tk.build import Instance, Launcher, all_instances
from tfla_tk.core.layout import ADDRESS_BITS

MEMORY_RATE = 3.35e6  # of an H100's memory, in bytes per microsecond


def launch_instead(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, *backends: ModuleType, stream: int = 7
) -> None:
    """Have these be launched, by `backends` on this stream of a GPU."""
    monkeypatch.setattr(build, "load", kernels.load)
    monkeypatch.setattr(build, "launches", kernels.in_order)
    pretend_a_gpu(monkeypatch, *backends, stream=stream)


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, *backends: ModuleType, stream: int = 7) -> None:
    """Have `backends` take this stream of a GPU of 132 multiprocessors, an H100's memory."""
    for name, found in (("multiprocessors", 132), ("current_stream", stream), ("memory_rate", MEMORY_RATE)):
        for backend in backends:
            for attribute in {name, f"_{name}"} & vars(backend).keys():
                monkeypatch.setattr(backend, attribute, lambda device, found=found: found)


class Kernels:
    """Stands for all launchers: records what is launched, and has it computed.

    Attributes:
        ARGUMENTS: names of the arguments of each function that prepares a launch.
        loaded: the machine code that was asked for.
        prepared: how many launches are.
        launches: what was launched: `name`, `stream`, and the arguments by their names.
    """

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self) -> None:
        self.loaded: list[Instance] = []
        self.prepared = 0
        self.launches: list[SimpleNamespace] = []

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

    def in_order(self, prepared: Iterable[SimpleNamespace]) -> Callable[[list[int], int], None]:
        """For `build.launches`."""
        in_order = list(prepared)

        def run(starts: list[int], stream: int) -> None:
            for launch in in_order:
                self.launches.append(SimpleNamespace(**vars(launch), stream=stream))
                self.compute(self.launches[-1], starts)

        return run

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        """What the kernel of a launch writes, where the tensors of its call begin at `starts`."""


def placed(x: Any, starts: list[int]) -> Any:
    """An argument of a prepared launch with addresses in place of the prepared ones, also in tuples."""
    if isinstance(x, tuple | list):
        return tuple(placed(each, starts) for each in x)
    if not isinstance(x, int) or x < 1 << ADDRESS_BITS:
        return x
    start = starts[(x >> ADDRESS_BITS) - 1]
    return start and start + x % (1 << ADDRESS_BITS)
