"""The record of what the compiler makes of every kernel: a text file whose changes a reviewer reads."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tfla_tk import build
from tfla_tk.build.locking import file_lock

from .compiled import GATED, Compiled
from .sass import Instruction

PATH = Path(__file__).with_name("sass_summary.txt")
_HEAD = """\
What the compiler makes of every kernel that the compile gate looks at; `make sass-summary` writes it.
From ptxas: registers per thread, bytes of stack frame, of spills (stores and loads), of static shared memory.
From the SASS: instructions, wgmmas, waits for them, and what stands between the first wgmma of a group and
the wait for all: exponentials, multiplications (FMUL), stores to shared memory (STSM) and by TMA.
"""
_COLUMNS = ("regs", "stack", "spill", "smem", "instr", "wgmma", "waits", "exp2", "fmul", "stsm", "tma")
_UNDER = {"exp2": "MUFU.EX2", "fmul": "FMUL", "stsm": "STSM", "tma": "UTMA"}
_SECTION = re.compile(r"^\[(.+)\]$")
_ENTRY = re.compile(
    r"Compiling entry function '(\S+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def compiler() -> str:
    """The compiler by whose version the record holds."""
    return build.find_toolchain().identity.partition(";")[0]


def rows_of(compiled: Compiled) -> list[str]:
    """One line for each kernel of an instance."""
    entries = _ENTRY.findall(compiled.ptxas_log)
    names = _demangled([symbol for symbol, *_ in entries])
    rows = []
    for name, (symbol, stack, stores, loads, registers, rest) in zip(names, entries, strict=True):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stores) + int(loads)
        of_ptxas = (int(registers), int(stack), spilled, int(shared[1]) if shared else 0)
        rows.append(_line((*of_ptxas, *_counts(compiled.functions[symbol])), name))
    return sorted(rows, key=lambda row: row.split()[-1])


def _line(numbers: tuple[int, ...], name: str) -> str:
    return " ".join(f"{number:>5}" for number in numbers) + "  " + name


def _counts(instructions: list[Instruction]) -> tuple[int, ...]:
    """Of the columns, those from the SASS."""
    wgmmas = waits = 0
    in_flight = False
    under = dict.fromkeys(_UNDER, 0)
    for opcode, operands in instructions:
        if opcode.startswith("HGMMA"):
            wgmmas, in_flight = wgmmas + 1, True
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            waits, in_flight = waits + 1, in_flight and not operands.endswith("0x0")
        elif in_flight:
            for name, prefix in _UNDER.items():
                under[name] += opcode.startswith(prefix)
    return len(instructions), wgmmas, waits, *under.values()


def _demangled(symbols: list[str]) -> list[str]:
    """Kernels with their template arguments, without namespaces, blanks and parameters."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    found = []
    for name in done.stdout.splitlines():
        short = re.sub(r"\(tfla_tk::\w+::(\w+)\)(\d+)", r"\1:\2", name.removeprefix("void "))
        short = re.sub(r"\w+::|\s", "", short).rpartition("(")[0]
        found.append(short)
    return found


def read() -> tuple[str, dict[str, list[str]]]:
    """The compiler's version, and the lines of every instance."""
    recorded, sections, rows = "", dict[str, list[str]](), list[str]()
    for line in PATH.read_text().splitlines() if PATH.exists() else []:
        if line.startswith("compiler: "):
            recorded = line.removeprefix("compiler: ")
        elif match := _SECTION.match(line):
            rows = sections.setdefault(match[1], [])
        elif line and recorded:
            rows.append(line)
    return recorded, sections


def write(name: str, rows: list[str], lock: Path) -> None:
    """Record an instance, and drop those that there are no more; worker processes share the lock."""
    with file_lock(lock):
        recorded, sections = read()
        if recorded != compiler():
            sections = {}
        sections[name] = rows
        text = [_HEAD + " ".join(f"{column:>5}" for column in _COLUMNS), "", f"compiler: {compiler()}"]
        for known in sorted({instance.name for instance in GATED} & sections.keys()):
            text += ["", f"[{known}]", *sections[known]]
        PATH.write_text("\n".join(text) + "\n")


def instructions_on_record() -> dict[str, int]:
    """Of every instance, all its kernels together: about as many as its compilation takes time."""
    column = _COLUMNS.index("instr")
    return {name: sum(int(row.split()[column]) for row in rows) for name, rows in read()[1].items()}
