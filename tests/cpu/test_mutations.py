"""The faults of tests/mutations can all be put in, and the tool tells those that are noticed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tfla_tk.build import shipped_instances

from ..mutations import __main__ as mutations
from ..mutations.faults import KERNELS, PYTHON, Fault

ROOT = Path(__file__).parents[2]
FAULTS = KERNELS + PYTHON


def test_every_fault_has_its_place_and_its_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    instances = {instance.name for instance in shipped_instances()}
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.text) == 1 and fault.text != fault.replacement, fault.name
        assert (fault.instance in instances) == (fault in KERNELS), fault.name
        for test in shlex.split(fault.tests):
            if test.startswith("tests/"):
                file, _, function = test.partition("[")[0].partition("::")
                assert re.search(rf"^def {function}\b", (ROOT / file).read_text(), re.MULTILINE), fault.name


@pytest.mark.slow
def test_what_becomes_of_a_fault(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    (source / "sums.py").write_text("def add(x, y):\n    return x + y\n\n\nTWICE = 2\n")
    (source / "test_sums.py").write_text("import sums\n\n\ndef test_add():\n    assert sums.add(2, 1) == 3\n")
    faults = {
        mutations.NOTICED: Fault("sign", "sums.py", "x + y", "x - y", "test_sums.py"),
        mutations.SURVIVED: Fault("factor", "sums.py", "TWICE = 2", "TWICE = 3", "test_sums.py"),
        mutations.GONE: Fault("order", "sums.py", "y + x", "y - x", "test_sums.py"),
        mutations.ERROR: Fault("nothing", "sums.py", "x + y", "x - y", "test_other.py"),
    }
    found = [mutations.run_fault(fault, source, cache, mutations.Options()) for fault in faults.values()]
    assert [result.result for result in found] == list(faults)
    assert found[0].first == "test_sums.py::test_add"
    noticed = [{"name": result.name, "result": mutations.NOTICED} for result in found]
    assert mutations.lost(noticed, found) == ["factor", "nothing"]
