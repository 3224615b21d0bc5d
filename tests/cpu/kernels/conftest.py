"""Every kernel instance compiled once for all the tests and worker processes; the backward in formulas."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tfla_tk import build
from tfla_tk.backends.tk import segments
from tfla_tk.backends.tk.scalar_gate import backward as tk_backward
from tfla_tk.backends.tk.scalar_gate import passes as tk_passes
from tfla_tk.bench import intra
from tfla_tk.build.disassembly import find_tool
from tfla_tk.build.locking import file_lock
from tfla_tk.core.layout import DTYPES, GRADIENTS
from tfla_tk.core.memo import Memo

from .backward_emulation import BackwardFormulas
from .backward_launches import Launches
from .sass import Instruction, functions_of
from .stand_in import launch_instead

_GRADIENTS = tuple(GRADIENTS)
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
# a kernel's config in its symbol: type, tile and, in any order, flags, gate, schedule and gradient
_CONFIG = re.compile(r"ConfigI(\d+)(\w+?)Li(\d+)ELi(\d+)E(\w*?)EEv")
_FLAG = re.compile(r"Lb([01])E")
_GATE = re.compile(r"\d+(ExponentialInput|SigmoidInput|ScalarDecay)")
_ENUM = re.compile(r"\d+(Schedule|Gradient)E(\d)E")
_KERNEL = re.compile(r"\d+((?:mlstm|gla)_[a-z_]+?)(?:_kernel)?[IE]")


def _is_wgmma_of_shared(opcode: str, operands: str) -> bool:
    """Whether both operands of a wgmma are in shared memory."""
    return opcode.startswith("HGMMA") and operands.split(", ")[1].startswith("gdesc")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with what its symbol names; schedule and gradient "" where it has none, gate ""
    where it is an argument.

    Of a pass of the backward, dim_qk and slice_v are the tile of the keys and the slice of the values.
    """

    name: str
    half: bool
    dim_qk: int
    slice_v: int
    normalize: bool
    gate: str
    schedule: str
    gradient: str
    instructions: list[Instruction]

    @property
    def wgmmas(self) -> int:
        return sum(opcode.startswith("HGMMA") for opcode, _ in self.instructions)

    def stages(self) -> list[Counter[str]]:
        """What the program holds while wgmmas are in flight, from WARPGROUP.ARRIVE to the wait for all.

        Counts per stage: "scores" (Q K^T), "inter" (Q C) and "register" (A from registers: P V, or the
        state) wgmmas, "exp2", "store" (TMA stores), "turn" (arrivals at the ping-pong barrier). The forward's
        first wgmma tells the shape of the scores' and which registers accumulate them.
        """
        found: list[Counter[str]] = []
        stage: Counter[str] | None = None
        first = next((op, o) for op, o in self.instructions if _is_wgmma_of_shared(op, o))
        scores = (first[0], first[1].split(",")[0])
        for opcode, operands in self.instructions:
            if opcode == "WARPGROUP.ARRIVE" and stage is None:
                stage = Counter()
            elif stage is None:
                continue
            elif opcode.startswith("HGMMA"):
                of_scores = (opcode, operands.split(",")[0]) == scores or self.name != "mlstm_fwd"
                shared = "scores" if of_scores else "inter"
                stage[shared if _is_wgmma_of_shared(opcode, operands) else "register"] += 1
            elif opcode == "WARPGROUP.DEPBAR.LE" and operands.endswith("0x0"):
                found.append(stage)
                stage = None
            elif name := _EVENTS.get(opcode.removesuffix(".4D")):
                stage[name] += 1
        return found


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, its SASS, and its kernels that multiply matrices."""

    instance: build.Instance
    ptxas_log: str
    sass: str
    every_kernel: list[Kernel]

    @property
    def kernels(self) -> list[Kernel]:
        """Those with a schedule."""
        return [kernel for kernel in self.every_kernel if kernel.schedule]


def parse_sass(sass: str) -> list[Kernel]:
    """The kernels of a disassembly."""
    found: list[Kernel] = []
    for function, instructions in functions_of(sass).items():
        name, config = _KERNEL.search(function), _CONFIG.search(function)
        assert name, f"{function} is no kernel of this package"
        if not config:
            continue
        length, text, dim_qk, slice_v, rest = config.groups()
        flags, gate = _FLAG.findall(rest), _GATE.search(rest)
        enums = dict(_ENUM.findall(rest))
        found.append(
            Kernel(
                name=name[1],
                half=text[: int(length)] == "__half",
                dim_qk=int(dim_qk),
                slice_v=int(slice_v),
                normalize=flags == ["1"],
                gate=gate[1] if gate else "",
                schedule=intra.SCHEDULES[int(enums["Schedule"])] if "Schedule" in enums else "",
                gradient=_GRADIENTS[int(enums["Gradient"])] if "Gradient" in enums else "",
                instructions=instructions,
            )
        )
    return found


@pytest.fixture(scope="session")
def compile_once(
    kernel_compiler: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[build.Instance], Compiled]:
    """Compile and disassemble an instance; worker processes share the results."""
    if find_tool("nvdisasm") is None:
        pytest.skip("no nvdisasm")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "kernel_sass"
    folder.mkdir(exist_ok=True)
    done: dict[build.Instance, Compiled] = {}

    def compiled(instance: build.Instance) -> Compiled:
        if instance not in done:
            log, sass = _read_or_compile(instance, folder)
            done[instance] = Compiled(instance, log, sass, parse_sass(sass))
        return done[instance]

    return compiled


def _read_or_compile(instance: build.Instance, folder: Path) -> tuple[str, str]:
    log, sass = folder / f"{instance.name}.log", folder / f"{instance.name}.sass"
    with file_lock(folder / f"{instance.name}.lock"):
        if not sass.exists():
            result = build.compile_cubin(instance, folder)
            log.write_text(result.ptxas_log)
            sass.write_text(build.disassemble(result.cubin))
    return log.read_text(), sass.read_text()


# The backward with other things in the place of its kernels


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Of tk_backward.mlstm_bwd, whose kernels are not run."""
    recorder = Launches()
    launch_instead(monkeypatch, tk_backward, recorder)
    monkeypatch.setattr(tk_backward, "_backwards", Memo())
    return recorder


@pytest.fixture
def backward_formulas(
    monkeypatch: pytest.MonkeyPatch, row_factors: Callable[..., Any], gate_gradients: Callable[..., Any]
) -> BackwardFormulas:
    """tk_backward.mlstm_bwd with the formula of every kernel in its place."""
    found = BackwardFormulas(row_factors, gate_gradients)
    launch_instead(monkeypatch, tk_backward, found, stream=0)
    monkeypatch.setattr(tk_backward, "_backwards", Memo())
    monkeypatch.setattr(segments, "cut", found.cut)
    monkeypatch.setattr(segments, "cut_packed", found.cut_packed)
    # what the kernels hold in fp32, and gates in fp64
    monkeypatch.setattr(tk_passes, "FLOAT", torch.float64.itemsize)
    monkeypatch.setitem(DTYPES, torch.float64, -1)
    return found
