"""pytest finds the tests."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_directory_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """As one named build is unless it is told otherwise."""
    files = list(TESTS.rglob("test_*.py"))
    assert Path(__file__) in files
    directories = {name for path in files for name in path.relative_to(TESTS).parent.parts}
    patterns = pytestconfig.getini("norecursedirs")
    assert not [name for name in directories for pattern in patterns if fnmatch(name, pattern)]
