"""Reads a disassembly."""

from __future__ import annotations

import re
from typing import NamedTuple

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")


class Instruction(NamedTuple):
    """One instruction, without its predicate."""

    opcode: str
    operands: str


def functions_of(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of every function by its symbol."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in sass.splitlines():
        if function := _FUNCTION.match(line):
            current = found.setdefault(function[1], [])
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(match[1], match[2]))
    return found
