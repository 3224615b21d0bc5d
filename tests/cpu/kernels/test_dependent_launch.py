"""Every kernel waits for those before it: most are launched so that they may start early."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import (
    INTRA_SCHEDULES,
    INTRA_TILES,
    SCHEDULES,
    mlstm_fwd,
    mlstm_intra,
    shipped_instances,
)

from .sass import functions_of

# memory but the arguments, what synchronises, and what could lead around the wait
NOT_BEFORE = re.compile(r"LD(?!C)|ST|RED|ATOM|UTM|UBL|CCTL|SYNCS|UCGA|BAR|BRA|BRX|JM|CALL|RET|EXIT|BSSY")
OTHERS = [mlstm_fwd(64, 64, schedule) for schedule in SCHEDULES]
OTHERS += [mlstm_intra(*INTRA_TILES[0], INTRA_SCHEDULES[0])]
INSTANCES = list(dict.fromkeys([*shipped_instances(), *OTHERS]))


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_nothing_comes_before_the_wait(
    instance: build.Instance, compile_once: Callable[[build.Instance], Any]
) -> None:
    functions = functions_of(compile_once(instance).sass)
    assert functions
    for name, instructions in functions.items():
        opcodes = [instruction.opcode for instruction in instructions]
        assert opcodes.count("PREEXIT") == opcodes.count("ACQBULK") == 1, name
        trigger, wait = opcodes.index("PREEXIT"), opcodes.index("ACQBULK")
        assert trigger < wait and not (instructions[trigger].predicate or instructions[wait].predicate), name
        before = [opcode for opcode in opcodes[:wait] if NOT_BEFORE.match(opcode)]
        assert not before, f"{name}: {before}"
