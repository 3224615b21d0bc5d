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
from tfla_tk.build.instances import INTRA_SCHEDULES
from tfla_tk.build.locking import file_lock

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_EVENTS = {"MUFU.EX2": "exp2", "UTMASTG": "store", "BAR.ARV": "turn"}
_CONFIG = re.compile(r"ConfigI(\d+)(\w+?)Li(\d+)ELi(\d+)E(?:Lb([01])E)?(?:LNS\w*_\d+ScheduleE(\d)E)?")
_KERNEL = re.compile(r"\d+(mlstm_[a-z_]+?)(?:_kernel)?I")


@dataclass(frozen=True)
class Kernel:
    """The SASS of one kernel, with what its symbol names; schedule "" where it has none."""

    name: str
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
    """One instance: what ptxas said, and its kernels that multiply matrices."""

    instance: build.Instance
    ptxas_log: str
    every_kernel: list[Kernel]

    @property
    def kernels(self) -> list[Kernel]:
        """Those with a schedule."""
        return [kernel for kernel in self.every_kernel if kernel.schedule]


def parse_sass(sass: str) -> list[Kernel]:
    """The kernels of a disassembly."""
    found: list[Kernel] = []
    current: Kernel | None = None
    for line in sass.splitlines():
        if function := _FUNCTION.match(line):
            name, config = _KERNEL.search(function[1]), _CONFIG.search(function[1])
            assert name, f"{function[1]} is no kernel of this package"
            current = None
            if config:
                length, text, dim_qk, slice_v, normalize, schedule = config.groups()
                current = Kernel(
                    name=name[1],
                    half=text[: int(length)] == "__half",
                    dim_qk=int(dim_qk),
                    slice_v=int(slice_v),
                    normalize=normalize == "1",
                    schedule=INTRA_SCHEDULES[int(schedule)] if schedule else "",  # begins with SCHEDULES
                    instructions=[],
                )
                found.append(current)
        elif current and (instruction := _INSTRUCTION.match(line)):
            current.instructions.append((instruction[1], instruction[2]))
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
