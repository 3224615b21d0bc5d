"""A launcher that disagrees with Python about layout or codes is not loaded; stand-ins for compiled ones."""

from __future__ import annotations

from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build import BuildError, Launcher, instances, shipped_launchers
from tfla_tk.build.instances import EXPECTED, check_exports


def test_every_number_of_both_halves_is_told_by_a_launcher() -> None:
    told = {name for launcher in shipped_launchers() for name in launcher.exports}
    assert told == EXPECTED.keys()
    for launcher in shipped_launchers():
        assert {"CHUNK", "DTYPES", "ADDRESS_BITS"} <= set(launcher.exports), launcher.name


@pytest.mark.parametrize("name", EXPECTED)
def test_a_launcher_that_disagrees_or_does_not_tell(name: str) -> None:
    own: Any = EXPECTED[name]
    other = own + 1 if isinstance(own, int) else {key: code + 1 for key, code in own.items()}
    for launcher in (
        instances.CHUNKWISE,
        instances.DECODING,
        instances.DELTA_RULE,
    ):
        told = {name: EXPECTED[name] for name in launcher.exports}
        check_exports(launcher, told)
        if name not in launcher.exports:
            check_exports(launcher, told | {name: other})
            continue
        with pytest.raises(BuildError) as caught:
            check_exports(launcher, told | {name: other})
        for part in (launcher.name, f"{name} = {other}", str(own)):
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
