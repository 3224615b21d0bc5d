"""The walk of a state that its warpgroups read out of their own registers, in the SASS of a kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Block:
    """A block's GEMMs after the state has been read, and what stands under those that update the state.

    Attributes:
        groups: kinds of its committed groups in their order; a "norm" goes with its "update".
        state: registers of the state, to which the update's wgmmas add.
        scaled: registers that an FMUL writes between the last of the reading and the first of the update.
        scaled_under_reading: those of them that it writes while the reading is in flight.
        before_values, after_values: opcodes while some of the update is in flight, before and after
            values^T scores^T is issued.
    """

    groups: list[str] = field(default_factory=list)
    state: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)
    scaled_under_reading: set[int] = field(default_factory=set)
    before_values: Counter[str] = field(default_factory=Counter)
    after_values: Counter[str] = field(default_factory=Counter)


def kinds(kernel: Any) -> list[str]:
    """Of every instruction: "" if it is no wgmma, else "scores" Q K^T, "read" state Q^T, "values" values^T
    scores^T, "update" values^T K, "norm" values^T x for eight columns x, or "sums" of keys, K^T weights, for
    as many columns of weights.
    """
    found: list[str] = []
    last = ""
    for opcode, operands in kernel.instructions:
        found.append("")
        if opcode.startswith("HGMMA"):
            last = found[-1] = _kind_of(opcode, operands, last)
    return found


def _kind_of(opcode: str, operands: str, last: str) -> str:
    """last: of the wgmma before."""
    _, a, *rest = operands.split(", ")
    if a.startswith("gdesc"):
        return ("sums" if ".64x8x16." in opcode else "values") if ".tnspA" in a else "scores"
    b, added_to, *_ = rest
    if ".tnspB" in b:
        return "update"
    if ".64x8x16." in opcode:
        return "norm"
    # an output begins with what is read of the state; what an operand of values makes is added to that
    return "read" if last == "read" or added_to == "RZ" else "values"


def walk_blocks(kernel: Any) -> list[Block]:
    """The blocks of a state warpgroup in the order of the program."""
    found: list[Block] = []
    in_flight: list[str] = []  # groups from their first wgmma on, the oldest first
    last, committed = "", True
    scaled: set[int] = set()
    under_reading: set[int] = set()
    for (opcode, operands), kind in zip(kernel.instructions, kinds(kernel), strict=True):
        if kind:
            if kind == "update" and last == "read":
                found.append(Block(scaled=scaled, scaled_under_reading=under_reading))
            if kind == "read":
                scaled, under_reading = set(), set()
            elif kind not in ("scores", "sums") and committed:
                found[-1].groups.append(kind)
            if kind == "norm":  # of the update's group, its last
                assert last == "update" and not committed and "gsb0" in operands
                committed = True
                continue
            if kind == "update":
                first = int(operands.split(", ")[0].removeprefix("R"))
                # fp32, M = 64: N / 2 registers per thread
                found[-1].state |= set(range(first, first + int(opcode.split(".")[1].split("x")[1]) // 2))
            if committed:
                in_flight.append(kind)
            assert in_flight[-1] == kind
            last, committed = kind, "gsb0" in operands
        elif opcode == "WARPGROUP.DEPBAR.LE":
            assert committed
            left = int(operands.split(", ")[1], 16)
            in_flight = in_flight[max(0, len(in_flight) - left) :]
        elif last == "read" and opcode.startswith("FMUL"):
            register = int(operands.split(", ")[0].removeprefix("R"))
            scaled.add(register)
            if in_flight:
                under_reading.add(register)
        if "update" in in_flight:
            block = found[-1]
            under = block.after_values if "values" in block.groups else block.before_values
            under[opcode.split(".")[0]] += 1
    assert not in_flight
    return found
