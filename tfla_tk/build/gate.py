"""What ptxas tells of kernels: serialised wgmma, ignored setmaxnreg, spills, stack frames."""

import re
from dataclasses import dataclass

from tfla_tk import env
from tfla_tk.build.errors import BuildError

_SERIALISED = re.compile(r"wgmma\S* instructions are serialized", re.IGNORECASE)
# C7500..C7599 cover serialised wgmma, injected waits and ignored setmaxnreg
_ADVISORY = re.compile(r"\bC75\d\d\b|setmaxnreg ignored", re.IGNORECASE)
_FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?([\w$.@]+)'?")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers per thread and bytes in local memory."""

    function: str
    registers: int
    stack_frame: int
    spill_stores: int
    spill_loads: int


def parse_ptxas_log(log: str) -> list[Resources]:
    """Read the output of ``ptxas -v``: one entry per kernel, in the order of the log."""
    found: list[Resources] = []
    function, frame = "?", (0, 0, 0)
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif match := _REGISTERS.search(line):
            found.append(Resources(function, int(match[1]), *frame))
            function, frame = "?", (0, 0, 0)
    return found


def ptxas_faults(log: str) -> list[str]:
    """The lines of a ptxas log that tell of lost performance, each frame line with its function."""
    faults: list[str] = []
    function = "?"
    for line in map(str.strip, log.splitlines()):
        if match := _FUNCTION.search(line):
            function = match[1]
        if _ADVISORY.search(line):
            faults.append(line)
        elif (match := _FRAME.search(line)) and any(int(size) for size in match.groups()):
            faults.append(f"{line} [{function}]")
    return faults


def check_ptxas_log(log: str, name: str = "kernel") -> None:
    """Refuse a kernel whose ptxas log tells of any lost performance, as this project's own tests do. log:
    Output of nvcc with ``-Xptxas=-v``. name: The instance, for the message. BuildError: Quotes every
    ``C75xx`` or "setmaxnreg ignored" line and every function with a stack frame or spills."""
    faults = ptxas_faults(log)
    if faults:
        raise BuildError(
            f"{name}: ptxas reports\n  " + "\n  ".join(faults),
            "use smaller tiles, fewer live accumulators, or order the wgmma waits and register fences; "
            "a kernel that serialises or spills is not shipped",
        )


class SerialisedError(BuildError):
    """The compiler serialises a kernel's wgmma instructions."""


def check_serialised(log: str, name: str, toolkit: str) -> None:
    """Refuse a kernel whose wgmma instructions the user's ptxas, of this toolkit, serialises: it is right,
    but several times slower."""
    found = [line.strip() for line in log.splitlines() if _SERIALISED.search(line)]
    if found:
        raise SerialisedError(
            f"{name}: {toolkit} serialises its matrix products\n  " + "\n  ".join(found),
            f"name an nvcc of CUDA 13.0 in {env.NVCC.name}, or set {env.PTXAS_GATE.name}=off to take the "
            "kernel, slow as it is",
        )
