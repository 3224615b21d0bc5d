"""pytest finds the tests, takes a few where it is to be quick, and sums up what it skips."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.pairs import pairwise

TESTS = Path(__file__).parents[1]


def test_no_directory_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """As one named build is unless it is told otherwise."""
    files = list(TESTS.rglob("test_*.py"))
    assert Path(__file__) in files
    directories = {name for path in files for name in path.relative_to(TESTS).parent.parts}
    patterns = pytestconfig.getini("norecursedirs")
    assert not [name for name in directories for pattern in patterns if fnmatch(name, pattern)]


SIZES = (4, 3, 2)


@pytest.mark.parametrize("third", range(SIZES[2]))
@pytest.mark.parametrize("second", range(SIZES[1]))
@pytest.mark.parametrize("first", range(SIZES[0]))
def test_parameters_meet_in_pairs(
    first: int, second: int, third: int, request: pytest.FixtureRequest
) -> None:
    """As stacked ones do, too, unless few are asked for."""
    found = pairwise(*map(range, SIZES))
    assert {(a, b) for a, b, _ in found} == {(a, b) for a in range(4) for b in range(3)}
    assert {(a, c) for a, _, c in found} == {(a, c) for a in range(4) for c in range(2)}
    assert {(b, c) for _, b, c in found} == {(b, c) for b in range(3) for c in range(2)}
    own = f"{request.function.__name__}["
    cases = [item for item in request.session.items if item.name.startswith(own)]
    assert len(cases) <= len(found) < 4 * 3 * 2


TWO_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_few(number):
    assert number == 0

@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_slow_at_first(number):
    assert number == 1

@pytest.mark.slow
def test_slow():
    assert False

@pytest.mark.parametrize("number", range(7))
def test_nothing(number):
    pytest.skip("there is no such machine")
"""


@pytest.mark.slow
def test_quick_takes_one_case_of_each_test_and_skips_are_one_line(
    in_forks: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    command = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["--color=no", str(tmp_path)]
    scripts = {x: f"pytest.main({[*command, *x.split()]})" for x in ("--quick", "")}
    first = f"import sys, pytest, torch\nsys.path.insert(0, {str(TESTS)!r})"
    printed = in_forks(first, scripts)
    for options, counts, skipped in (
        ("--quick", "2 passed, 1 skipped, 11 deselected", "skipped: 1: there is no such machine"),
        ("", "5 failed, 2 passed, 7 skipped", "skipped: 7: there is no such machine"),
    ):
        assert counts in printed[options], printed[options]
        lines = printed[options].splitlines()
        assert lines.count(skipped) == 1 and "SKIPPED" not in printed[options]
