"""The examples at toy size."""

from __future__ import annotations

import importlib.util
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
def test_as_scripts(in_forks: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    """From anywhere; without xlstm they say what to install."""
    installed = all(importlib.util.find_spec(name) for name in ("mlstm_kernels", "xlstm"))
    model = str(tmp_path / "model.pt")
    small = ["--steps", "2", "--batch", "1", "--seq", "64", "--width", "32", "--blocks", "1"]
    arguments = {
        "train_xlstm": [*small, "--save", model],
        "generate_xlstm": [model, "--tokens", "8"],
    }
    first = "import contextlib, io, os, runpy, sys, torch._dynamo\nos.chdir('/')\n"
    first += f"sys.path[0] = {str(EXAMPLES)!r}\n"
    run = "sys.argv = {!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    scripts = {name: run.format([str(EXAMPLES / f"{name}.py"), *given]) for name, given in arguments.items()}
    scripts |= {
        f"{name} without xlstm": WITHOUT_XLSTM.format(str(EXAMPLES / f"{name}.py")) for name in arguments
    }
    printed = in_forks(first, {x: script for x, script in scripts.items() if installed or "without" in x})
    for name in arguments:
        assert "pip install '.[xlstm]'" in printed[f"{name} without xlstm"]
    if not installed:
        pytest.skip("mlstm-kernels or xlstm is not installed")
    assert "mLSTM layers on" in printed["train_xlstm"] and "decoding on" in printed["generate_xlstm"]


WITHOUT_XLSTM = """
sys.modules["xlstm"], sys.argv = None, [{0!r}]
with contextlib.redirect_stdout(io.StringIO()) as out:
    try:
        runpy.run_path({0!r}, run_name="__main__")
    except SystemExit as end:
        assert isinstance(end.code, str) and not out.getvalue()  # the message of status 1
        told = end.code
print(told)
"""
