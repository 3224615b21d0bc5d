"""A module that disagrees with Python about layout or codes is not loaded; stand-ins for compiled ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tfla_tk import build
from tfla_tk.build import BuildError, Instance, all_instances, builder
from tfla_tk.build.exports import EXPECTED, check_exports
from tfla_tk.build.instances import (
    delta_rule,
    delta_states,
    mlstm_bwd,
    mlstm_fwd,
    mlstm_pass,
    mlstm_sequence,
    mlstm_step,
)
from tfla_tk.core import layout

OTHERS = {
    "CHUNK": 128,
    "ANCHOR_CHUNKS": 4,
    "DELTA_ANCHOR_CHUNKS": 2,
    "SEGMENT_CHUNKS": 32,
    "GRADIENTS": {"dq": 1, "dk": 0, "dv": 2},
    "DTYPES": {"float32": 0, "bfloat16": 2, "float16": 1},
    "ADDRESS_BITS": 32,
    "MAX_KEYS": 512,
    "MAX_SLICES": 8,
}


def module_of(instance: Instance, **changed: Any) -> ModuleType:
    module = ModuleType(instance.name)
    vars(module).update({name: EXPECTED[name] for name in instance.exports} | changed)
    return module


def test_what_python_expects() -> None:
    assert (EXPECTED["CHUNK"], EXPECTED["MAX_SLICES"]) == (layout.CHUNK, layout.MAX_SLICES)
    assert EXPECTED["DTYPES"] == {"float32": 0, "bfloat16": 1, "float16": 2}
    assert EXPECTED.keys() == OTHERS.keys()


def test_what_a_module_exports() -> None:
    """All of them tell chunk and dtypes, mLSTM's anchors."""
    for instance in all_instances():
        assert {"CHUNK", "DTYPES"} <= set(instance.exports) <= EXPECTED.keys(), instance.name
    shared = {"CHUNK", "ANCHOR_CHUNKS", "DTYPES"}
    assert set(mlstm_fwd(64, 64).exports) == shared
    assert set(mlstm_bwd().exports) == shared | {"ADDRESS_BITS"}
    assert set(mlstm_pass("dq", 64, 64).exports) == shared | {"ADDRESS_BITS", "GRADIENTS"}
    for instance in (delta_rule("forward", 64), delta_rule("backward", 64), delta_states(64)):
        assert set(instance.exports) >= {"SEGMENT_CHUNKS", "ADDRESS_BITS"}
    for instance in (mlstm_step(), mlstm_sequence(8)):
        assert set(instance.exports) == shared | {"MAX_KEYS", "MAX_SLICES"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_module_that_disagrees(name: str) -> None:
    for instance in (mlstm_fwd(64, 64), mlstm_pass("dv", 64, 64), mlstm_step()):
        check_exports(instance, module_of(instance))
        changed = module_of(instance, **{name: OTHERS[name]})
        if name not in instance.exports:
            check_exports(instance, changed)
            continue
        with pytest.raises(BuildError) as caught:
            check_exports(instance, changed)
        for part in (instance.name, f"{name} = {OTHERS[name]}", str(EXPECTED[name])):
            assert part in caught.value.reason
        assert "reinstall" in caught.value.remedy


def test_a_module_that_lacks_one() -> None:
    module = module_of(mlstm_fwd(64, 64))
    del module.CHUNK
    with pytest.raises(BuildError, match="CHUNK = nothing, the Python package 64"):
        check_exports(mlstm_fwd(64, 64), module)


def test_loading_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of another version is not kept; the right one is."""
    instance = mlstm_fwd(64, 64)
    found = [module_of(instance, CHUNK=128), module_of(instance)]
    monkeypatch.setattr(builder, "_loaded", {})
    monkeypatch.setattr(builder, "_build", lambda *args, **options: SimpleNamespace(module=Path("unused")))
    monkeypatch.setattr(builder, "_import", lambda name, path: found[0])
    for _ in range(2):
        with pytest.raises(BuildError, match="CHUNK = 128, the Python package 64"):
            build.load(instance)
    del found[0]
    assert build.load(instance) is found[0]
