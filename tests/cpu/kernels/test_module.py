"""What launchers offer to Python: sizes, prepared launches, and what they refuse; nothing is launched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tfla_tk import build
from tfla_tk.build import Launcher
from tfla_tk.build.instances import CHUNKWISE, DELTA_RULE
from tfla_tk.core.layout import ADDRESS_BITS

Load = Callable[[Launcher], ModuleType]
AT = 1 << ADDRESS_BITS  # where the only tensor begins
NO_DRIVER = "CUDA driver version is insufficient"
without_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="the launch would be real")


@pytest.fixture
def module(load_once: Load) -> ModuleType:
    return load_once(CHUNKWISE)


def forward_arguments(segments: int = 1) -> list[Any]:
    operand, gate = (AT, 8192, 8192, 64), (AT, 128, 128, 1, 0)
    cut = (0, False, 1, segments, 2 // segments)
    return [
        *([operand] * 4), *([gate] * 2), (0,) * 6, (0,) * 3, (0,) * 3, cut, 0 if segments == 1 else AT,
        (1, 1, 128, 64, 64), 1, (64, 64), 0.125, 1e-6, False, False, True, 0,
    ]  # fmt: skip


def test_sizes_past_2_to_the_31(module: ModuleType) -> None:
    assert module.workspace_bytes(200_000, 64, 64) > 2**31
    assert module.anchor_bytes(8, 16, 64, 256, 64, 128, 10_000) > 2**31


def test_arguments_are_numbers_in_any_nest(module: ModuleType) -> None:
    assert module.flow_parts(1, 2, [64, (256, 64)], 128) == module.flow_parts(1, 2, 64, 256, 64, 128)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: x[:-1], "forward: takes more than the 57 arguments that it got"),
        (lambda x: [*x, 0], "forward: takes 58 arguments, got 59"),
        (lambda x: [(1.5, *x[0][1:]), *x[1:]], "forward: argument 0: expected an integer"),
        (lambda x: [(None, *x[0][1:]), *x[1:]], "forward: argument 0: expected an integer"),
        (lambda x: [*x[:-6], None, *x[-5:]], "forward: argument 52: expected a number"),
    ],
    ids=["too few", "too many", "a float", "None", "None for a float"],
)
def test_other_arguments_are_refused(change: Callable[[Any], Any], told: str, module: ModuleType) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        module.forward(*change(forward_arguments()))
    module.forward(*forward_arguments())


@pytest.mark.parametrize(
    ("wrong", "error"), [("64", TypeError), (2**63, OverflowError), (object(), TypeError)]
)
def test_what_is_no_number_is_refused(wrong: Any, error: type[Exception], module: ModuleType) -> None:
    with pytest.raises(error):
        module.flow_parts(1, 2, 64, 256, 64, wrong)


@without_driver
@pytest.mark.parametrize("segments", [1, 2])
def test_a_launch_without_a_driver_is_an_error(segments: int, module: ModuleType) -> None:
    """The first of one, or of three."""
    run = build.launches([module.forward(*forward_arguments(segments))])
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        run([16], 0)
    with pytest.raises(IndexError):  # of a tensor that there is not
        run([], 0)
    build.launches([])([], 0)


@without_driver
def test_launches_outlive_what_they_are_made_of(module: ModuleType) -> None:
    """The prepared launches, and the list of them, which may change."""
    prepared = [module.forward(*forward_arguments()) for _ in range(3)]
    run = build.launches(prepared)
    prepared.clear()
    gc.collect()
    others = [module.forward(*forward_arguments(2)) for _ in range(100)]  # in their place, had they gone
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        run([16], 0)
    assert len(others) == 100


@without_driver
def test_launchers_side_by_side(module: ModuleType, load_once: Load) -> None:
    """Each has functions of its own, compiled from the same sources; launches of both go in one row."""
    delta = load_once(DELTA_RULE)
    assert delta.forward is not module.forward and delta.CHUNK == module.CHUNK == 64
    rows = ((AT, 64, 1, 1), (AT, 0, 1e-6), (0, AT, 64), 64, 0)
    for launchers in ((module, delta), (delta, module)):
        launches = [launcher.mlstm_bwd_factors(*rows) for launcher in launchers]
        with pytest.raises(RuntimeError, match=f"mlstm_bwd_factors: {NO_DRIVER}"):
            build.launches(launches)([16], 0)


def test_machine_code_that_is_not_there(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/no\.cubin cannot be loaded: "):
        module.load_kernels(str(tmp_path / "no.cubin"))
