"""Every kernel is compiled to what is on record: sass_summary.txt, which `make sass-summary` writes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import pytest

from tfla_tk import build

from . import summary
from .compiled import GATED, Compiled, Compiler

HOW = "if this is meant: `make sass-summary`, and commit tests/cpu/kernels/sass_summary.txt"


@pytest.mark.parametrize("instance", GATED, ids=lambda instance: instance.name)
def test_what_is_compiled_is_on_record(
    instance: build.Instance,
    compile_once: Callable[[build.Instance], Compiled],
    compiler: Compiler,
    pytestconfig: pytest.Config,
) -> None:
    """No spill and no stack frame, whichever compiler it is; the rest by the recorded version."""
    compiled = compile_once(instance)
    build.check_ptxas_log(compiled.ptxas_log, instance.name)
    rows = summary.rows_of(compiled)
    if pytestconfig.getoption("write_sass_summary"):
        summary.write(instance, rows, compiler.folder / "summary.lock")
        return
    recorded, sections = summary.read()
    if recorded != summary.compiler():
        pytest.skip(f"the record is for {recorded}, this is {summary.compiler()}")
    known = sections.get(instance.name, summary.Section("", []))
    if rows != known.rows:
        changed = difflib.unified_diff(known.rows, rows, "recorded", "compiled", n=0, lineterm="")
        pytest.fail("\n".join([f"{instance.name}: {HOW}", f" {summary.columns()}", *changed]), pytrace=False)
    assert known.key == summary.key_of(instance), f"the record is of other sources: {HOW}"


def test_the_record_has_every_instance() -> None:
    _, sections = summary.read()
    assert sections.keys() == {instance.name for instance in GATED}, HOW
