"""A launcher that disagrees with Python about layout or codes is not loaded; stand-ins for compiled ones."""

from __future__ import annotations

from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build import BuildError, Launcher, instances, shipped_launchers
from tfla_tk.build.exports import EXPECTED, check_exports

OTHERS = {
    "CHUNK": 128,
    "ANCHOR_CHUNKS": 4,
    "STATE_CHUNKS": 1,
    "FLOW_PARTS": 8,
    "DELTA_ANCHOR_CHUNKS": 2,
    "SEGMENT_CHUNKS": 32,
    "DELTA_SLICE_COLUMNS": 64,
    "DELTA_DECAY_CHUNKS": 4,
    "DELTA_KEYS_WARPS": 8,
    "GRADIENTS": {"dq": 1, "dk": 0, "dv": 2},
    "DTYPES": {"float32": 0, "bfloat16": 2, "float16": 1},
    "ADDRESS_BITS": 32,
    "MAX_KEYS": 512,
    "MAX_TOKENS": 8,
    "DECODE_TOKENS": 8,
    "MAX_SLICES": 8,
}


def test_every_number_of_both_halves_is_told_by_a_launcher() -> None:
    told = {name for launcher in shipped_launchers() for name in launcher.exports}
    assert told == EXPECTED.keys() == OTHERS.keys()
    for launcher in shipped_launchers():
        assert {"CHUNK", "DTYPES", "ADDRESS_BITS"} <= set(launcher.exports), launcher.name


@pytest.mark.parametrize("name", EXPECTED)
def test_a_launcher_that_disagrees_or_does_not_tell(name: str) -> None:
    for launcher in (
        instances.CHUNKWISE[False],
        instances.CHUNKWISE[True],
        instances.DECODING,
        instances.DELTA_RULE,
    ):
        told = {name: EXPECTED[name] for name in launcher.exports}
        check_exports(launcher, told)
        if name not in launcher.exports:
            check_exports(launcher, told | {name: OTHERS[name]})
            continue
        with pytest.raises(BuildError) as caught:
            check_exports(launcher, told | {name: OTHERS[name]})
        for part in (launcher.name, f"{name} = {OTHERS[name]}", str(EXPECTED[name])):
            assert part in caught.value.reason
        assert "reinstall" in caught.value.remedy
        del told[name]
        with pytest.raises(BuildError, match=f"{name} = nothing, the Python package "):
            check_exports(launcher, told)


def test_loading_checks(
    fake_compiler: Any, fake_extension: Any, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of another version is not kept; the right one is."""
    fake_extension.constants["CHUNK"] = 128
    for _ in range(2):
        with pytest.raises(BuildError, match="CHUNK = 128, the Python package 64"):
            build.load(launcher)
    fake_extension.constants["CHUNK"] = 64
    assert build.load(launcher) is build.load(launcher)
