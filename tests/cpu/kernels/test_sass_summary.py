"""Every kernel is compiled to what is on record: sass_summary.txt, which `make sass-summary` writes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import pytest

from tfla_tk import build
from tfla_tk.build.instances import mlstm_fwd

from . import summary
from .compiled import GATED, GROUPS, Compiled, Compiler

HOW = "if this is meant: `make sass-summary`, and commit tests/cpu/kernels/sass_summary.txt"


@pytest.mark.parametrize("instances", GROUPS, ids=lambda instances: "+".join(x.name for x in instances))
def test_what_is_compiled_is_on_record(
    instances: list[build.Instance],
    compile_once: Callable[[list[build.Instance]], list[Compiled]],
    compiler: Compiler,
    pytestconfig: pytest.Config,
) -> None:
    """No spill and no stack frame, whichever compiler it is; the rest by the recorded version."""
    found = [(x.instance, summary.rows_of(x), x.ptxas_log) for x in compile_once(instances)]
    for instance, rows, ptxas_log in found:
        build.check_ptxas_log(ptxas_log, instance.name)
        if pytestconfig.getoption("write_sass_summary"):
            summary.write(instance, rows, compiler.folder / "summary.lock")
    if pytestconfig.getoption("write_sass_summary"):
        return
    recorded, sections = summary.read()
    if recorded != summary.compiler():
        pytest.skip(f"the record is for {recorded}, this is {summary.compiler()}")
    for instance, rows, _ in found:
        known = sections.get(instance.name, summary.Section("", []))
        if rows != known.rows:
            changed = difflib.unified_diff(known.rows, rows, "recorded", "compiled", n=0, lineterm="")
            lines = [f"{instance.name}: {HOW}", f" {summary.columns()}", *changed]
            pytest.fail("\n".join(lines), pytrace=False)
        assert known.key == summary.key_of(instance), f"the record is of other sources: {HOW}"


def test_the_record_has_every_instance() -> None:
    _, sections = summary.read()
    assert sections.keys() == {instance.name for instance in GATED}, HOW


# What is on record

NARROW, WIDE = (128, 256), (256, 128)  # tiles of the forward, of which there are sequential ones, too
INSTRUCTIONS = 7_500  # of all roles: at 256/512 one of 6,880 fits the cache, one of 8,320 took 28 % longer
HALF_A_STATE = 32  # registers


@pytest.mark.parametrize("half", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("sequential", [False, True], ids=["overlapped", "sequential"])
def test_the_overlap_of_the_forward(sequential: bool, half: bool) -> None:
    """Exponentials and stores under wgmmas; at K = 256, where the state is in registers, its decay and h."""
    (narrow,), (wide,) = (
        summary.numbers_on_record(mlstm_fwd(tile, half, sequential=sequential).name)
        for tile in (NARROW, WIDE)
    )
    assert [narrow[name] > 0 for name in ("u-exp2", "u-tma")] == [not sequential] * 2
    assert [wide["u-fmul"] >= HALF_A_STATE, wide["u-stsm"] > 0] == [not sequential] * 2
    assert wide["instr"] <= INSTRUCTIONS


def test_nothing_spills() -> None:
    for instance in GATED:
        for kernel in summary.numbers_on_record(instance.name):
            assert kernel["spill"] == kernel["local"] == kernel["stack"] == 0, instance.name
