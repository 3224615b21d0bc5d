"""Every kernel waits for those before it: most are launched so that they may start early."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build import sources
from tfla_tk.build.instances import (
    INTRA_SCHEDULES,
    INTRA_TILES,
    SCHEDULES,
    mlstm_fwd,
    mlstm_intra,
    shipped_instances,
)

SECTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+\s+)?)(\S+)", re.MULTILINE)
# memory but the arguments, what synchronises, and what could lead around the wait
NOT_BEFORE = re.compile(r"LD(?!C)|ST|RED|ATOM|UTM|UBL|CCTL|SYNCS|UCGA|BAR|BRA|BRX|JM|CALL|RET|EXIT|BSSY")
OTHERS = [mlstm_fwd(64, 64, schedule) for schedule in SCHEDULES]
OTHERS += [mlstm_intra(*INTRA_TILES[0], INTRA_SCHEDULES[0])]
INSTANCES = list(dict.fromkeys([*shipped_instances(), *OTHERS]))


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_nothing_comes_before_the_wait(
    instance: build.Instance, compile_once: Callable[[build.Instance], Any]
) -> None:
    _, *sections = SECTION.split(compile_once(instance).sass)
    assert sections
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        instructions = INSTRUCTION.findall(text)
        opcodes = [opcode for _, opcode in instructions]
        assert opcodes.count("PREEXIT") == opcodes.count("ACQBULK") == 1, name
        trigger, wait = opcodes.index("PREEXIT"), opcodes.index("ACQBULK")
        assert trigger < wait and instructions[trigger][0] == instructions[wait][0] == "", name
        before = [opcode for opcode in opcodes[:wait] if NOT_BEFORE.match(opcode)]
        assert not before, f"{name}: {before}"


def test_every_header_is_part_of_a_kernel() -> None:
    """What nothing includes would still be shipped, and change the key of every module."""
    root = sources.kernels_root()
    files = [path for path in root.rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp")]
    included = {
        name.rsplit("/", 1)[-1]
        for path in files
        for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))
    }
    headers = {path.name for path in files if path.suffix in (".h", ".cuh")}
    assert headers <= included
