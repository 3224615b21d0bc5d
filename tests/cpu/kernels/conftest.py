"""Compilers, and what takes the place of launchers."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TypeVar

import pytest

from tfla_tk import build
from tfla_tk.backends.tk.delta_rule import call as delta_call
from tfla_tk.build.toolchain import find_tool

from . import calls, summary
from .compiled import GROUPS, Compiled, Compiler
from .emulated import compile_emulated
from .order import compile_first
from .scalar_gate import Decoding
from .stand_in import MEMORY_RATE, Kernels, launch_instead, watched_memory

K = TypeVar("K", bound=Kernels)

# days in which every unchanged instance is compiled: in one of them what takes half a minute of a CPU core
TURNS = 60


@pytest.fixture(autouse=True)
def _memory_of_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_call, "memory_rate", lambda device: MEMORY_RATE)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what runs compilers."""
    if "kernel_compiler" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.compiles)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest.

    What is recorded is looked at by the whole compile gate, since `make test` relies on that for kernels that
    have not changed since.
    """
    if config.getoption("write_sass_summary"):
        items[:] = [item for item in items if "compile_once" in getattr(item, "fixturenames", ())]
    items[:] = compile_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Of all worker processes of a session."""
    folder: Path = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def _lasting_folder(folder: Path, config: pytest.Config) -> Path:
    """For this run of the tests and later ones; this folder where pytest keeps nothing."""
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return folder if cache is None else cache.mkdir("tfla_tk")


@pytest.fixture(scope="session")
def compiler(
    kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Compiler:
    """One for all tests and worker processes."""
    folder = _shared_folder(tmp_path_factory, "kernels")
    return Compiler(folder, _lasting_folder(folder, pytestconfig))


@pytest.fixture(scope="session")
def compile_once(
    compiler: Compiler, pytestconfig: pytest.Config
) -> Callable[[list[build.Instance]], list[Compiled]]:
    """Those of a group of instances, compiled and disassembled, that have changed since they were recorded.

    Skips the test where none has. Some groups are compiled all the same, others each day.
    """
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    every = pytestconfig.getoption("every_kernel") or pytestconfig.getoption("write_sass_summary")
    today = datetime.date.today().toordinal()

    def compiled(instances: list[build.Instance]) -> list[Compiled]:
        in_turn = GROUPS.index(instances) % TURNS == today % TURNS
        wanted = [x for x in instances if every or in_turn or not summary.is_unchanged(x)]
        if not wanted:
            pytest.skip("unchanged since they were recorded; --every-kernel compiles them")
        return [*map(compiler.compiled, wanted)]

    return compiled


@pytest.fixture(scope="session")
def load_once(compiler: Compiler) -> Callable[[build.Launcher], ModuleType]:
    """What a launcher offers to Python."""
    return compiler.launcher


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Of the operator of a test, in the place of which the reference computes."""
    with taking_the_place_of_kernels(request.getfixturevalue("op").kernels(), monkeypatch) as found:
        yield found


@pytest.fixture(scope="session")
def emulated(
    kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> SimpleNamespace:
    """What the launcher of decoding offers, compiled once: it runs on the CPU."""
    folder = _lasting_folder(_shared_folder(tmp_path_factory, "emulated"), pytestconfig)
    return compile_emulated("decode.cpp", folder)


@pytest.fixture
def decoding(emulated: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    """Launches of mLSTM's decoding, which run on the CPU."""
    with taking_the_place_of_kernels(Decoding(emulated.mlstm), monkeypatch) as found:
        yield found


@contextmanager
def taking_the_place_of_kernels(found: K, monkeypatch: pytest.MonkeyPatch) -> Iterator[K]:
    launch_instead(monkeypatch, found, *calls.MODULES)
    calls.take_tensors_for_a_gpus(monkeypatch)
    with watched_memory(found, monkeypatch):
        yield found
    calls.forget_calls()
