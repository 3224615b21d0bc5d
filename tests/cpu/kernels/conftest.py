"""Every kernel instance compiled once for all the tests and all the worker processes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tfla_tk import build
from tfla_tk.build.disassembly import find_tool
from tfla_tk.build.instances import SCHEDULES
from tfla_tk.build.locking import file_lock

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
_CONFIG = re.compile(r"ConfigI(\d+)(\w+?)Li(\d+)ELi(\d+)ELb([01])ELNS\w*_\d+ScheduleE(\d)E")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with the template arguments that its symbol names."""

    half: bool
    dim_qk: int
    slice_v: int
    normalize: bool
    schedule: str
    instructions: list[tuple[str, str]]

    @property
    def wgmmas(self) -> int:
        return sum(opcode.startswith("HGMMA") for opcode, _ in self.instructions)

    def stages(self) -> list[Counter[str]]:
        """What the program holds while wgmmas are in flight, from WARPGROUP.ARRIVE to the wait for all.

        Counts per stage: "scores" (Q K^T), "inter" (Q C) and "register" (A from registers: P V, or the
        state) wgmmas, "exp2", "store" (TMA stores), "turn" (arrivals at the ping-pong barrier).
        """
        found: list[Counter[str]] = []
        stage: Counter[str] | None = None
        for opcode, operands in self.instructions:
            if opcode == "WARPGROUP.ARRIVE" and stage is None:
                stage = Counter()
            elif stage is None:
                continue
            elif opcode.startswith("HGMMA"):
                stage[self._kind(operands)] += 1
            elif opcode == "WARPGROUP.DEPBAR.LE" and operands.endswith("0x0"):
                found.append(stage)
                stage = None
            elif name := _EVENTS.get(opcode.removesuffix(".4D")):
                stage[name] += 1
        return found

    @staticmethod
    def _kind(operands: str) -> str:
        if not operands.split(", ")[1].startswith("gdesc"):
            return "register"
        return "inter" if "tnspB" in operands else "scores"


@dataclass(frozen=True)
class Compiled:
    """One instance: what ptxas said, and its kernels."""

    instance: build.Instance
    ptxas_log: str
    kernels: list[Kernel]


def parse_sass(sass: str) -> list[Kernel]:
    """The kernels of a disassembly."""
    found: list[Kernel] = []
    for line in sass.splitlines():
        if function := _FUNCTION.match(line):
            config = _CONFIG.search(function[1])
            assert config, f"{function[1]} names no configuration"
            length, text, dim_qk, slice_v, normalize, schedule = config.groups()
            half = text[: int(length)] == "__half"
            name = SCHEDULES[int(schedule)]
            found.append(Kernel(half, int(dim_qk), int(slice_v), normalize == "1", name, []))
        elif found and (instruction := _INSTRUCTION.match(line)):
            found[-1].instructions.append((instruction[1], instruction[2]))
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
            done[instance] = Compiled(instance, log, parse_sass(sass))
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
