"""Puts something else in the place of compiled modules."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tfla_tk import build
from tfla_tk.build import Instance


def launch_instead(
    monkeypatch: pytest.MonkeyPatch, backend: ModuleType, modules: Any, stream: int = 7
) -> None:
    """Have `backend` launch what `modules.load` returns, on this stream of a GPU of 132 multiprocessors."""
    monkeypatch.setattr(build, "load", modules.load)
    monkeypatch.setattr(backend, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(backend, "_current_stream", lambda device: stream)


class PreparedLaunches:
    """Stands for the modules of all instances: records what is launched, and has it computed.

    Attributes:
        ARGUMENTS: names of the arguments of each function that prepares a launch.
    """

    ARGUMENTS: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.launches: list[SimpleNamespace] = []

    def load(self, instance: Instance) -> PreparedLaunches:
        self.instances.append(instance)
        return self

    def __getattr__(self, name: str) -> Any:
        """A function that prepares a launch."""
        if name not in self.ARGUMENTS:
            raise AttributeError(name)

        def prepare(*arguments: Any) -> SimpleNamespace:
            given = dict(zip(self.ARGUMENTS[name], arguments, strict=True))
            return SimpleNamespace(handle=SimpleNamespace(name=name, **given))

        return prepare

    def Launches(self, handles: list[SimpleNamespace]) -> SimpleNamespace:
        def run(starts: list[int], stream: int) -> None:
            assert stream == 7
            for handle in handles:
                self.launches.append(handle)
                self.compute(handle, starts)

        return SimpleNamespace(run=run)

    def compute(self, launch: SimpleNamespace, starts: list[int]) -> None:
        """What the kernel of a launch writes, where the tensors of its call begin at `starts`."""
        raise NotImplementedError
