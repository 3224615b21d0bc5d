"""Every kernel waits for those before it: they are launched so that they may start early."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build.instances import shipped_instances

SECTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", re.MULTILINE)
# global memory in any way, and the end of a thread
AFTER = re.compile(r"(LDG|STG|LD|ST|ATOM\w*|RED|LDGSTS|UTMA\w+|UBLKCP|EXIT)(\.|$)")


@pytest.mark.parametrize("instance", shipped_instances(), ids=lambda instance: instance.name)
def test_nothing_comes_before_the_wait(
    instance: build.Instance, compile_once: Callable[[build.Instance], Any]
) -> None:
    _, *sections = SECTION.split(compile_once(instance).sass)
    assert sections
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        opcodes = OPCODE.findall(text)
        assert opcodes.count("PREEXIT") == opcodes.count("ACQBULK") == 1, name
        first = next(n for n, opcode in enumerate(opcodes) if AFTER.match(opcode))
        assert opcodes.index("PREEXIT") < opcodes.index("ACQBULK") < first, name
