"""The record of what the compiler makes of every kernel: a text file whose changes a reviewer reads."""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfla_tk import build
from tfla_tk.build.cache import source_key
from tfla_tk.build.locking import file_lock

from .compiled import GATED, Compiled
from .sass import Instruction

PATH = Path(__file__).with_name("sass_summary.txt")
_HEAD = """\
What the compiler makes of every kernel that the compile gate looks at; `make sass-summary` writes it.
From ptxas: registers per thread, bytes of stack frame, of spills (stores and loads), of static shared memory.
From the SASS: instructions, wgmmas, waits for them; what stands between the first wgmma of a group and the
wait for all (u-exp2 to u-tma); how often it all stands in the program; behind the name the shapes of wgmmas.
The key behind an instance's name is that of its sources: the tests compile what has changed, and some of
the rest by turns.
"""
_UNDER = {"u-exp2": "MUFU.EX2", "u-fmul": "FMUL", "u-stsm": "STSM", "u-tma": ("UTMASTG", "UTMAREDG")}
_IN_ALL = {
    "exp2": "MUFU.EX2",
    "mma": "HMMA",
    "half2": ("HFMA2", "HMUL2"),
    "shfl": "SHFL",
    "ldsm": "LDSM",
    "stsm": "STSM",
    "ldg": "LDG",
    "stg": "STG",
    "tma": ("UTMASTG", "UTMAREDG"),
    "local": ("LDL", "STL"),
    "atom": ("ATOM", "RED"),
}
_COLUMNS = ("regs", "stack", "spill", "smem", "instr", "wgmma", "waits", *_UNDER, *_IN_ALL)
_SECTION = re.compile(r"^\[(\S+)\](?: (\w+))?$")
_ENTRY = re.compile(
    r"Compiling entry function '(\S+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def compiler() -> str:
    """The compiler by whose version the record holds."""
    return build.find_toolchain().identity.partition(";")[0]


def columns() -> str:
    """Their names, above the lines of kernels."""
    return _line(_COLUMNS)


def rows_of(compiled: Compiled) -> list[str]:
    """One line for each kernel of an instance, by their names."""
    entries = _ENTRY.findall(compiled.ptxas_log)
    names = _demangled([symbol for symbol, *_ in entries])
    rows = []
    for name, (symbol, stack, stores, loads, registers, rest) in sorted(zip(names, entries, strict=True)):
        shared = re.search(r"(\d+) bytes smem", rest)
        of_ptxas = (int(registers), int(stack), int(stores) + int(loads), int(shared[1]) if shared else 0)
        instructions = compiled.functions[symbol]
        numbers = (*of_ptxas, *_counts(instructions))
        rows.append("  ".join([_line(numbers), name, *_shapes(instructions)]))
    return rows


def _line(values: Sequence[int | str]) -> str:
    return " ".join(f"{value:>{max(len(column), 3)}}" for column, value in zip(_COLUMNS, values, strict=True))


def _counts(instructions: list[Instruction]) -> tuple[int, ...]:
    """Of the columns, those from the SASS."""
    wgmmas = waits = 0
    in_flight = False
    under: Counter[str] = Counter()
    for opcode, operands in instructions:
        if opcode.startswith("HGMMA"):
            wgmmas, in_flight = wgmmas + 1, True
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            waits, in_flight = waits + 1, in_flight and not operands.endswith("0x0")
        elif in_flight:
            under.update(name for name, prefix in _UNDER.items() if opcode.startswith(prefix))
    in_all = (sum(opcode.startswith(prefix) for opcode, _ in instructions) for prefix in _IN_ALL.values())
    return len(instructions), wgmmas, waits, *(under[name] for name in _UNDER), *in_all


def _shapes(instructions: list[Instruction]) -> list[str]:
    """Of the wgmmas, with how many there are of each."""
    found = Counter(opcode.split(".")[1] for opcode, _ in instructions if opcode.startswith("HGMMA"))
    return [f"{shape}*{count}" for shape, count in sorted(found.items())]


def _demangled(symbols: list[str]) -> list[str]:
    """Kernels with their template arguments, without namespaces, blanks and parameters."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    plain = (re.sub(r"\w+::|\s", "", name.removeprefix("void ")) for name in done.stdout.splitlines())
    return [re.sub(r"\((\w+)\)(\d+)", r"\1:\2", name).rpartition("(")[0] for name in plain]


class Section(NamedTuple):
    """Of an instance: the key of its sources, and a line for each kernel."""

    key: str
    rows: list[str]


def key_of(instance: build.Instance) -> str:
    """Of the sources of an instance as they are."""
    return source_key(instance, build.find_thunderkittens(clone=False).identity)


@functools.cache
def is_unchanged(instance: build.Instance) -> bool:
    """Whether the record holds what this compiler makes of these sources."""
    recorded, sections = read()
    known = sections.get(instance.name)
    return known is not None and recorded == compiler() and known.key == key_of(instance)


def read() -> tuple[str, dict[str, Section]]:
    """The compiler's version, and the section of every instance."""
    recorded, sections, rows = "", dict[str, Section](), list[str]()
    for line in PATH.read_text().splitlines() if PATH.exists() else []:
        if line.startswith("compiler: "):
            recorded = line.removeprefix("compiler: ")
        elif match := _SECTION.match(line):
            rows = sections.setdefault(match[1], Section(match[2] or "", [])).rows
        elif line and recorded:
            rows.append(line)
    return recorded, sections


def write(instance: build.Instance, rows: list[str], lock: Path) -> None:
    """Record an instance, and drop those that there are no more; worker processes share the lock."""
    with file_lock(lock):
        recorded, sections = read()
        if recorded != compiler():
            sections = {}
        sections[instance.name] = Section(key_of(instance), rows)
        text = [_HEAD, columns(), "", f"compiler: {compiler()}"]
        for known in sorted({instance.name for instance in GATED} & sections.keys()):
            text += ["", f"[{known}] {sections[known].key}", *sections[known].rows]
        PATH.write_text("\n".join(text) + "\n")


def numbers_on_record(instance: str) -> list[dict[str, int]]:
    """Those of each kernel of an instance, by columns."""
    rows = read()[1][instance].rows
    return [dict(zip(_COLUMNS, map(int, row.split()[: len(_COLUMNS)]), strict=True)) for row in rows]


def instructions_on_record() -> dict[str, int]:
    """Of every instance, all its kernels together: about as many as its compilation takes time."""
    column = _COLUMNS.index("instr")
    return {name: sum(int(row.split()[column]) for row in known.rows) for name, known in read()[1].items()}
