"""What make tells of its set-up and of the tests; a script stands for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    -c*) ;;
    --version) echo Python 3.12 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"pip install"*--quiet*) ;;
    *"pip install"*) echo Collecting torch ;;
    *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def make(target: str, python: Path) -> list[str]:
    """The lines that a target prints on a fresh machine."""
    command = ["make", target, f"PYTHON={python}", f"VENV={python.parent / 'environment'}"]
    # without what a make that has started the tests hands on
    handed_on = ("MAKE", "ARGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(handed_on)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_set_up_shows_what_it_installs(python: Path) -> None:
    lines = make("run", python)
    assert "Collecting torch" in lines[:-1] and lines[-1] == "ran -m tfla_tk compare"
    assert make("run", python) == lines[-1:]


def test_how_long_the_tests_take_is_told_before_they_run(python: Path) -> None:
    *_, told, ran = make("test", python)
    assert "minutes" in told and "make test-quick" in told and ran.startswith("ran -m pytest ")
    quick = make("test-quick", python)[-1]
    assert quick.startswith("ran -m pytest ") and "--quick" in quick
