"""The examples at toy size."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

Load = Callable[[str], Any]


@pytest.fixture
def load(mlstm_kernels: Any) -> Load:
    """Imports an example."""
    pytest.importorskip("xlstm", reason="xlstm is not installed")

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_train_and_generate(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("abcabcabd" * 100)
    sizes = ["--steps", "40", "--batch", "4", "--seq", "64", "--width", "32", "--blocks", "1", "--lr", "0.01"]
    train, generate = load("train_xlstm"), load("generate_xlstm")
    losses = train.main([str(text), *sizes, "--save", str(tmp_path / "model.pt")])
    assert len(losses) == 40 and losses[-1] < 1.0 < losses[0]
    original = train.main([str(text), *sizes, "--original"])
    assert losses == pytest.approx(original, abs=2e-3)

    options = [str(tmp_path / "model.pt"), "--prompt", "abcabcabdabc", "--tokens", "13"]
    written = generate.main(options)
    assert written.startswith("abcabcabdabc") and len(written.encode()) == 12 + 13
    assert written == generate.main([*options, "--original"])
    printed = capsys.readouterr().out
    assert "mLSTM layers on" in printed and "decoding on" in printed

    with pytest.raises(SystemExit):
        generate.main([str(tmp_path / "absent.pt")])
    assert "absent.pt: there is no such file" in capsys.readouterr().err


def test_without_arguments(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both run on a file of the repository; a few steps stand for their own number of them."""
    train, generate = load("train_xlstm"), load("generate_xlstm")
    assert train.TEXT == ROOT / "README.md" and train.parse([]).steps == train.SIZES["steps"]
    monkeypatch.setitem(train.SIZES, "steps", 6)
    monkeypatch.setitem(train.SIZES, "width", 32)
    losses = train.main([])
    assert len(losses) == 6 and losses[-1] < losses[0]
    monkeypatch.setitem(sys.modules, "train_xlstm", train)  # as beside a script that is run
    written = generate.main([])
    assert written.startswith("The ") and len(written) > 50
    printed = capsys.readouterr().out
    assert printed.count("step     5  loss") == 2 and "decoding on" in printed


@pytest.mark.slow
def test_as_scripts(mlstm_kernels: Any, tmp_path: Path) -> None:
    """From anywhere."""
    pytest.importorskip("xlstm", reason="xlstm is not installed")
    model = str(tmp_path / "model.pt")
    small = ["--steps", "2", "--batch", "1", "--seq", "64", "--width", "32", "--blocks", "1"]
    for name, options, printed in (
        ("train_xlstm", [*small, "--save", model], "mLSTM layers on"),
        ("generate_xlstm", [model, "--tokens", "8"], "decoding on"),
    ):
        command = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=400)
        assert done.returncode == 0 and printed in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["train_xlstm", "generate_xlstm"])
def test_without_xlstm_they_say_what_to_install(name: str) -> None:
    hidden = (
        "import sys, runpy; sys.modules['xlstm'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    command = [sys.executable, "-W", "ignore", "-c", hidden, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and "pip install '.[xlstm]'" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
