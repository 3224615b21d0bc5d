"""Every instance compiled once for all the tests and worker processes; the backward in formulas."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tfla_tk import build
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.delta_rule import call as delta_call
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import forward as tk_forward
from tfla_tk.backends.tk.scalar_gate import walks as tk_walks
from tfla_tk.build.disassembly import find_tool
from tfla_tk.core.layout import DTYPES
from tfla_tk.core.memo import Memo

from . import summary
from .backward_emulation import BackwardFormulas
from .compiled import GATED, Compiled, Compiler
from .order import compile_first
from .stand_in import MEMORY_RATE, launch_instead

# days in which every unchanged instance is compiled: in one of them as many as take a minute of a CPU core
TURNS = 30


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


@pytest.fixture(scope="session")
def compiler(
    kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Compiler:
    """One for all tests and worker processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "kernels"
    folder.mkdir(exist_ok=True)
    cache = getattr(pytestconfig, "cache", None)
    return Compiler(folder, folder if cache is None else cache.mkdir("tfla_tk"))


@pytest.fixture(scope="session")
def compile_once(compiler: Compiler, pytestconfig: pytest.Config) -> Callable[[build.Instance], Compiled]:
    """The device code of an instance, compiled and disassembled.

    Skips the test where the record holds what the sources of the instance give: all that looks at compiled
    kernels has looked at these. Some of these are compiled all the same, others each day.
    """
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    every = pytestconfig.getoption("every_kernel") or pytestconfig.getoption("write_sass_summary")
    today = datetime.date.today().toordinal()

    def compiled(instance: build.Instance) -> Compiled:
        in_turn = GATED.index(instance) % TURNS == today % TURNS
        if not (every or in_turn) and summary.is_unchanged(instance):
            pytest.skip("unchanged since it was recorded; --every-kernel compiles it")
        return compiler.compiled(instance)

    return compiled


@pytest.fixture(scope="session")
def load_once(compiler: Compiler) -> Callable[[build.Launcher], ModuleType]:
    """What a launcher offers to Python."""
    return compiler.launcher


# The backward with other things in the place of its kernels


@pytest.fixture
def backward_formulas(
    monkeypatch: pytest.MonkeyPatch, row_factors: Callable[..., Any], gate_gradients: Callable[..., Any]
) -> BackwardFormulas:
    """tk_backward.mlstm_bwd with the formula of every kernel in its place."""
    found = BackwardFormulas(row_factors, gate_gradients)
    launch_instead(monkeypatch, found, tk_backward, tk_forward)
    monkeypatch.setattr(tk_backward, "_backwards", Memo())
    monkeypatch.setattr(tk_forward, "_forwards", Memo())
    monkeypatch.setattr(segments, "cut", found.cut)
    monkeypatch.setattr(segments, "cut_packed", found.cut_packed)
    # what the kernels hold in fp32, and gates in fp64
    monkeypatch.setattr(tk_walks, "FLOAT", torch.float64.itemsize)
    monkeypatch.setitem(DTYPES, torch.float64, -1)
    return found
