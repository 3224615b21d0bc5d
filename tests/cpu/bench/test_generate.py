"""`python -m tfla_tk.bench generate`: a toy on a CPU, and what makes the command fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tfla_tk.bench import generate
from tfla_tk.integrations import fla as integration

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    pytest.importorskip("transformers")
    pytest.importorskip("fla.ops", reason="fla-core is not installed")
    yield
    integration.restore()


def test_the_command(monkeypatch: pytest.MonkeyPatch, command) -> None:
    monkeypatch.setattr(generate, "FULL", (3, 1))
    status, rows, out, _ = command("generate", "--commit", "abc")
    assert status == 0
    (row,) = rows
    assert (row["op"], row["pass"], row["backend"]) == ("qwen3_next_model", "decode", "reference")
    assert (row["shape"]["B"], row["shape"]["T"], row["shape"]["HV"]) == (1, 3, 4)
    assert row["tflops"] is None and row["ms"] > 0
    assert "tokens/s" in out and not integration.is_accelerated()


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch, command) -> None:
    """A model that the kernels do not serve, and one that raises."""

    def broken(sizes: Any) -> None:
        raise ValueError("no such model")

    with monkeypatch.context() as patch:
        patch.setattr(integration, "paths", lambda: {"chunk_gla": {"fla": 3}})
        ran = command("generate", "--quick", "--commit", "abc")
    assert ran.status == 1 and "chunk_gla was served by fla 3 times" in ran.out
    monkeypatch.setitem(generate.MAKE, "qwen3_next_model", broken)
    ran = command("generate", "--quick", "--commit", "abc")
    assert ran.status == 1 and "ValueError: no such model" in ran.out
